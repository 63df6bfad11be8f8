"""Stop strings are found at the token that completes them, whatever the tokens are; and every decoder agrees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordPiece
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.engine.embedded.paged import BURST
from dapo.engine.stop import StopStrings
from dapo.errors import ModelError
from dapo.model.attention import ATTENTION_NAME
from dapo.model.tokens import ResponseTexts, token_bytes
from dapo.types import Request, SamplingParams
from tests.engine.test_paged import drain, paged_engine, prompt
from tests.tiny import EOS_ID, SPECIALS, VOCAB_SIZE, tiny_llama, tiny_tokenizer

# Whole words, parts of words, a stop string in one token, and characters that are split over two or three tokens.
PIECES = ["a", "b", "ab", "ba", "</", "end", ">", "</end>", "nd>x", "\n", "\n\n", "é", "x€y"]
PIECES += [b"\xc3", b"\xa9", b"\xa9</", b"\xe2\x82", b"\xac", b"\xe2", b"\x82\xac", b"\xf0\x9f\x98", b"\x80", b"\x80b"]
STOPS = [("</end>",), ("é",), ("€", "b\n"), ("\U0001f600",), ("ab", "aba"), ("\n\n",), ("x€y</end>", "é</")]


def encode(piece: str | bytes) -> str:
    """Write the bytes of a piece as a byte-level tokenizer does."""
    alphabet = bytes_to_unicode()
    return "".join(alphabet[byte] for byte in (piece.encode() if isinstance(piece, str) else piece))


def byte_level(size: int = 0) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of the pieces, repeated up to `size` tokens under names that decode alike."""
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *map(encode, PIECES)])}
    while len(vocabulary) < size:
        vocabulary[encode(f"{'ab'[len(vocabulary) % 2]}{len(vocabulary)}")] = len(vocabulary)
    core = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    core.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=SPECIALS[EOS_ID])


def sentencepiece() -> PreTrainedTokenizerFast:
    pieces = ["▁a", "b", "▁", "ab", "</", "end", ">", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    core = Tokenizer(BPE(vocab={token: index for index, token in enumerate(pieces)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=core)


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()
responses = st.lists(st.integers(0, len(SPECIALS) + len(PIECES) - 1), max_size=30)


def expected_length(tokenizer, texts, tokens) -> int | None:
    """Return the shortest beginning of the response whose text contains a stop string."""
    for length in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:length], skip_special_tokens=False)
        if any(stop in text for stop in texts):
            return length
    return None


@given(responses)
def test_the_bytes_of_tokens_join_to_the_text_that_the_tokenizer_decodes(tokens):
    table = token_bytes(BYTE_LEVEL)
    joined = b"".join(table[token] for token in tokens).decode("utf-8", "replace")
    assert joined == BYTE_LEVEL.decode(tokens, skip_special_tokens=False)


@given(st.lists(st.integers(0, 7), max_size=20))
def test_the_bytes_of_sentencepiece_tokens_join_to_the_text(tokens):
    table = token_bytes(SENTENCEPIECE)
    joined = b"".join(table[token] for token in tokens).decode()
    assert joined.removeprefix(" ") == SENTENCEPIECE.decode(tokens, skip_special_tokens=False)
    assert table[8 + 0xC3] == b"\xc3"


@pytest.mark.parametrize("texts", STOPS)
@given(tokens=responses)
@settings(max_examples=60)
def test_a_response_ends_at_the_first_token_after_which_its_text_holds_a_stop_string(texts, tokens):
    stop = StopStrings(BYTE_LEVEL, texts)
    expected = expected_length(BYTE_LEVEL, texts, tokens)
    assert stop.length(tokens) == stop.length(np.array(tokens, np.int32)) == expected
    # Whoever looks at some tokens at a time finds the same end.
    for size in (1, 3, BURST):
        looks = (stop.length(tokens[: start + size], start) for start in range(0, len(tokens), size))
        assert next((length for length in looks if length is not None), None) == expected


def test_a_character_of_three_byte_tokens_ends_a_response_at_its_last_byte():
    stop = StopStrings(SENTENCEPIECE, ("€",))
    euro = [8 + byte for byte in "€".encode()]
    assert stop.length([0, *euro[:2]]) is None
    assert stop.length([0, *euro, 0]) == 4
    assert stop.length([euro[0], 0, *euro[1:]]) is None


def test_ids_beyond_the_vocabulary_have_no_text():
    stop = StopStrings(BYTE_LEVEL, ("ab",))
    assert stop.length([4, 10_000, 5]) == 3


def test_a_special_token_can_be_a_stop_string():
    assert StopStrings(BYTE_LEVEL, ("<|im_start|>",)).length([4, 1, 4]) == 2


def test_a_tokenizer_whose_tokens_have_no_bytes_is_refused():
    core = Tokenizer(WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ModelError, match=r"^rollout\.stop: the model's tokenizer is neither a byte-level nor a"):
        StopStrings(PreTrainedTokenizerFast(tokenizer_object=core), ("x",))


def test_texts_keep_the_tags_of_a_thought_even_where_they_are_special_tokens():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    tokens = tokenizer("a[THINK]b[/THINK]c<|im_end|>")["input_ids"]
    assert ResponseTexts(tokenizer)([tokens]) == ["abc"]
    assert ResponseTexts(tokenizer, ("[THINK]", "[/THINK]"))([tokens, []]) == ["a[THINK]b[/THINK]c", ""]
    assert ResponseTexts(tokenizer, ("<think>", "</think>"))([tokens]) == ["abc"]


def engines(tokenizer, **sizes):
    """Return the decoders for CPU and GPU, both on the same tiny model."""
    model = tiny_llama()
    model.set_attn_implementation(ATTENTION_NAME)
    eager = EmbeddedEngine(model, tokenizer, frozenset({EOS_ID}), 0, sizes.get("max_concurrent", 64))
    paged = paged_engine(model, **sizes)
    paged.tokenizer = tokenizer
    return eager, paged


@pytest.mark.parametrize("sizes", [{}, {"max_concurrent": 3}, {"pages": 8, "max_concurrent": 12}])
def test_decoders_that_look_at_every_step_or_at_every_burst_end_responses_at_the_same_token(sizes):
    tokenizer = byte_level(VOCAB_SIZE)
    eager, paged = engines(tokenizer, **sizes)
    texts = ("ab", "é", "€", "\n\n")
    params = SamplingParams(max_tokens=90)
    requests = [Request(i, prompt(5 + i, seed=i), 4, params) for i in range(4)]
    free = drain(eager, *requests)
    stopping = [Request(r.serial, r.prompt, r.n, SamplingParams(max_tokens=90, stop=texts)) for r in requests]
    found = drain(eager, *stopping), drain(paged, *stopping)
    ends = {}
    for key, rollout in free.items():
        tokens = rollout.tokens.tolist()
        length = expected_length(tokenizer, texts, tokens) or len(tokens)
        ends[key] = length
        for each in (one[key] for one in found):
            assert each.tokens.tolist() == tokens[:length]
            np.testing.assert_allclose(each.logprobs, rollout.logprobs[:length], atol=2e-5)
            assert each.finish_reason == ("stop" if length < len(tokens) else rollout.finish_reason)
    assert len({length % BURST for length in ends.values()}) > 3, "this test needs ends anywhere in a burst"
    assert paged.active == {} and not paged.waiting


def test_a_weight_update_in_mid_burst_leaves_no_switch_behind_the_end():
    _, paged = engines(tiny_tokenizer())
    params = SamplingParams(max_tokens=80, stop=tuple("aeiou"))
    paged.submit([Request(i, prompt(6, seed=i), 4, params) for i in range(6)])
    rollouts, version = [], 0
    while finished := paged.poll():
        rollouts += finished
        version += 1
        paged.sync_weights(version)
    assert len(rollouts) == 24
    assert all(switch < len(rollout) for rollout in rollouts for switch in rollout.switches)
    assert all(rollout.versions[-1] == rollout.weight_version + len(rollout.switches) for rollout in rollouts)
