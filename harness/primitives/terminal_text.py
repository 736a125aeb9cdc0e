"""Turns what a program wrote for a terminal into plain text for a model. Pure and idempotent."""

from __future__ import annotations

import re

# Strings (titles, clipboard: OSC, DCS, SOS, PM, APC), control sequences (colours, cursor), and the rest. Each may be
# cut off by the end of the text. None spans a line, so that a lost end costs no more than a line.
_ESCAPE = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x9c|\x1b\\)?"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|\x1b[ -/]*[0-~]?"
)
# Begins at a run's first character only: else a long run costs its square.
_LINE_END = re.compile(r"(?<!\r)\r+\n")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CONTROL_BUT_FRAMES = re.compile(r"[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def plain_text(text: str) -> str:
    """Return `text` roughly as a terminal would have left it.

    There is no escape sequence in it, and no control character but tab and newline.
    Of a line that was written over with carriage returns, the last frame that shows something stays; backspaces rub
    out. CRLF is an end of line, not a frame.
    """
    if not _CONTROL.search(text):
        return text
    text = _ESCAPE.sub("", _LINE_END.sub("\n", text))
    text = _CONTROL_BUT_FRAMES.sub("", text)
    if "\r" not in text and "\b" not in text:
        return text
    return "\n".join(_last_frame(line) for line in text.split("\n"))


def _last_frame(line: str) -> str:
    frames = [_rubbed_out(frame) for frame in line.split("\r")]
    return next((frame for frame in reversed(frames) if frame.strip()), frames[-1])


def _rubbed_out(frame: str) -> str:
    if "\b" not in frame:
        return frame
    kept: list[str] = []
    for character in frame:
        if character != "\b":
            kept.append(character)
        elif kept:
            kept.pop()
    return "".join(kept)
