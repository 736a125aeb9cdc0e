"""A line typed while the terminal is drawn on: keys are read one by one, nothing is echoed by the terminal itself."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import re
import signal
import termios
from collections.abc import Callable, Iterator

_ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|.)", re.DOTALL)
_PLAIN = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]+")
_PASTE_BEGIN = "\x1b[200~"
_PASTE_END = "\x1b[201~"
_ERASE = ("\x7f", "\x08")
_CLEAR_LINE = "\x15"
_ERASE_WORD = "\x17"
_REDRAW = "\x0c"

MAX_LINE_CHARS = 100_000


class LineEditor:
    """Turns keys into lines. Pure.

    A pasted text is taken as it is, with its line breaks; Enter ends a line. Arrow keys and the like are ignored.
    """

    def __init__(self) -> None:
        """Start with nothing typed."""
        self.text = ""
        self._pending = ""
        self._is_pasting = False

    def feed(self, keys: str) -> list[str]:
        """Return the lines that `keys` complete."""
        lines: list[str] = []
        keys, self._pending = self._pending + keys, ""
        position = 0
        while position < len(keys):
            if keys[position] == "\x1b":
                match = _ESCAPE_SEQUENCE.match(keys, position)
                if match is None:
                    # The rest of the sequence comes with the next read.
                    self._pending = keys[position:]
                    break
                self._feed_sequence(match.group())
                position = match.end()
                continue
            run = _PLAIN.match(keys, position)
            if run is not None:
                # Piece by piece, not key by key: a paste may be long.
                self._feed_text(run.group())
                position = run.end()
                continue
            self._feed_key(keys[position], lines)
            position += 1
        return lines

    def _feed_text(self, run: str) -> None:
        shown = "".join(key for key in run if key.isprintable() or key == "\t")
        self.text += shown[: max(0, MAX_LINE_CHARS - len(self.text))]

    def _feed_sequence(self, sequence: str) -> None:
        if sequence == _PASTE_BEGIN:
            self._is_pasting = True
        elif sequence == _PASTE_END:
            self._is_pasting = False

    def _feed_key(self, key: str, lines: list[str]) -> None:
        if key in "\r\n":
            if self._is_pasting:
                self.text += "\n"
            elif line := self.text.strip():
                lines.append(line)
                self.text = ""
        elif key in _ERASE:
            self.text = self.text[:-1]
        elif key == _CLEAR_LINE:
            self.text = ""
        elif key == _ERASE_WORD:
            kept = self.text.rstrip()
            self.text = kept[: len(kept) - len(kept.rpartition(" ")[2].split()[-1])] if kept else ""


@contextlib.contextmanager
def typed_lines(
    descriptor: int,
    *,
    on_change: Callable[[str], None],
    on_line: Callable[[str], None],
    on_continue: Callable[[], None],
) -> Iterator[None]:
    """Call `on_line` with each line typed on a terminal and `on_change` with what stands on the line so far.

    The keys of signals (Ctrl-C, Ctrl-Z) work as ever; `on_continue` is called when the process goes on after Ctrl-Z.
    The terminal is as before when the block ends.
    """
    saved = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()
    editor = LineEditor()
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read() -> None:
        try:
            keys = os.read(descriptor, 65536)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            keys = b""
        if not keys:
            loop.remove_reader(descriptor)  # the terminal is gone
            return
        for line in editor.feed(decoder.decode(keys)):
            on_line(line)
        on_change(editor.text)

    def go_on() -> None:
        # The shell had the terminal meanwhile, and set it as it likes.
        set_key_mode(descriptor)
        on_continue()

    set_key_mode(descriptor)
    loop.add_reader(descriptor, read)
    loop.add_signal_handler(signal.SIGCONT, go_on)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGCONT)
        loop.remove_reader(descriptor)
        restore_mode(descriptor, saved)


def set_key_mode(descriptor: int) -> None:
    """Let the terminal hand over each key at once, unechoed."""
    mode = termios.tcgetattr(descriptor)
    mode[0] &= ~termios.IXON  # Ctrl-S would freeze the output, and the run behind it
    mode[3] &= ~(termios.ICANON | termios.ECHO)
    mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
    termios.tcsetattr(descriptor, termios.TCSADRAIN, mode)


def restore_mode(descriptor: int, saved: list[object]) -> None:
    """Give the terminal back as it was; a terminal that is gone needs nothing."""
    with contextlib.suppress(termios.error):
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)  # type: ignore[arg-type]  # as tcgetattr gave it
