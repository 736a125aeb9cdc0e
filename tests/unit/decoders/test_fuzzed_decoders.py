"""A decoder that is given anything at all returns or raises what it declares, soon, and says it in sound words."""

from __future__ import annotations

import pytest

from tests.support.decoders import DECODERS
from tests.support.fuzzing import (
    LONG_ROUNDS,
    LONG_S,
    SHORT_ROUNDS,
    SHORT_S,
    Decoder,
    corpus,
    fuzz,
    try_input,
)

decoders = pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)


@decoders
def test_corpus_breaks_nothing(decoder: Decoder) -> None:
    inputs = corpus(decoder.name)
    assert inputs
    for name, data in inputs.items():
        try_input(decoder, data, name)


@pytest.mark.slow
@decoders
def test_what_is_made_of_the_corpus_breaks_nothing(decoder: Decoder) -> None:
    assert fuzz(decoder, rounds=SHORT_ROUNDS, within_s=SHORT_S) > 0


@pytest.mark.long
@pytest.mark.timeout(600)
@decoders
def test_what_is_made_of_the_corpus_for_long_breaks_nothing(decoder: Decoder) -> None:
    assert fuzz(decoder, rounds=LONG_ROUNDS, within_s=LONG_S, run=1) > 0
