"""Step ends on sampled token ids, for tokenizers of every kind.

Two independent references: for byte-level tokenizers the bytes of each token laid end to end (tags are ASCII,
so the structure can be read from bytes as latin-1); for all others a scan over every decoded prefix.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tangolite.parsing import split_steps, step_end_positions

LINES = [
    "<think>\n<step>x = 5.</step>\n<step>y = 5.</step>\n</think>\n<answer>\\boxed{5}</answer>",
    "<step></step><step></step><step></step>",
    "<step>2 √ 3 → é</step>\n<step>so 4²</step>\n",
]
TAGS = ["<think>", "</think>", "<step>", "</step>", "<answer>", "</answer>"]
WORDS = ["<pad>", "<eos>", "<|im_start|>", *TAGS, "a", "b", "\\boxed{", "}", " ", "+", *"0123456789"]
texts = st.lists(
    st.sampled_from([*TAGS, "a", " 5.", "\n", "é", "√", " x", "<", ">", "<st"]), max_size=30
).map("".join)


def train(tokenizer: Tokenizer, trainer: trainers.Trainer) -> PreTrainedTokenizerFast:
    tokenizer.train_from_iterator(LINES * 20, trainer)
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


@cache
def byte_level(vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """Byte-level BPE without a word split, so that merges run across tags, line ends and whole steps."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return train(
        tokenizer,
        trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<|end|>"], initial_alphabet=alphabet),
    )


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """A sentence-piece style unigram model: decoding drops the first token's leading space, and only that."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return train(
        tokenizer,
        trainers.UnigramTrainer(vocab_size=80, special_tokens=["<|end|>", "<unk>"], unk_token="<unk>"),
    )


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Llama style: metaspace, unknown characters as byte tokens, one leading space stripped in all."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    trained.train_from_iterator(
        [LINES[0]] * 20, trainers.BpeTrainer(vocab_size=120, special_tokens=["<|end|>"])
    )
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    vocab = {piece: i for i, piece in enumerate([*pieces, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    strip = decoders.Strip(content=" ", left=1, right=0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def word_level(decoder: decoders.Decoder | None) -> Tokenizer:
    """One token per tag (special) and symbol; without a decoder, decoding puts spaces between tokens."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<|im_start|>", *TAGS])
    return tokenizer


@cache
def fused_words() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=word_level(decoders.Fuse()), eos_token="<eos>", pad_token="<eos>"
    )


@cache
def spaced_words() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=word_level(None), eos_token="<eos>", pad_token="<eos>")


@cache
def raw_words() -> Tokenizer:
    return word_level(decoders.Fuse())


@cache
def word_pieces() -> PreTrainedTokenizerFast:
    words = [*WORDS, "##a", "##5", "##</step>", "##<step>", "##</st", "##ep>"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


ALL = [byte_level, metaspace, byte_fallback, fused_words, spaced_words, raw_words, word_pieces]


class CountingTokenizer:
    """Hands on to another tokenizer and counts the calls."""

    def __init__(self, tokenizer):
        self.tokenizer, self.calls = tokenizer, 0

    def decode(self, ids, **options):
        self.calls += 1
        return self.tokenizer.decode(ids, **options)


class ListTokenizer:
    """A list of pieces and nothing else: no options, not hashable."""

    __hash__ = None

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids)


def word_ids(*words: str) -> list[int]:
    return [WORDS.index(word) for word in words]


def text_of(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


def ends_by_prefixes(ids: list[int], tokenizer) -> list[int]:
    """For each step, the first prefix of the ids whose text reaches the end of its closing tag."""
    text = text_of(tokenizer, ids)
    ends = [step.end + len("</step>") for step in split_steps(text)]
    prefixes = [text_of(tokenizer, ids[: i + 1]) for i in range(len(ids))]
    return [next(i for i, p in enumerate(prefixes) if p.startswith(text[:end])) for end in ends]


def ends_by_bytes(ids: list[int], tokenizer) -> list[int]:
    """The token holding the last byte of each closing tag."""
    owner, data = [], b""
    for i, piece in enumerate(token_bytes(tokenizer)[token_id] for token_id in ids):
        data += piece
        owner += [i] * len(piece)
    return [owner[step.end + len("</step>") - 1] for step in split_steps(data.decode("latin-1"))]


@cache
def token_bytes(tokenizer) -> list[bytes]:
    """Bytes of every token of a byte-level tokenizer: its table moves unprintable bytes to 256 and up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    return [bytes(table[char] for char in piece) for piece in pieces]


# The cases that broke others


def test_the_end_is_the_closing_tag_and_not_the_token_after_it():
    ids = word_ids("<step>", "a", "</step>", "<step>", "b", "</step>")
    assert step_end_positions(ids, fused_words()) == [2, 5]


def test_a_token_that_runs_past_the_tag_completes_it():
    tokenizer = ListTokenizer(["<step>", "x =", " 5.</step>\n", "<step>", "y", "</step>"])
    assert tokenizer.decode(range(6))[9:20] == " 5.</step>\n"
    assert step_end_positions(range(6), tokenizer) == [2, 5]


def test_special_tokens_that_decoding_may_drop_keep_their_place():
    ids = word_ids("<step>", "<|im_start|>", "a", "</step>")
    assert step_end_positions(ids, fused_words()) == [3]
    tokenizer = byte_level()
    special = tokenizer.convert_tokens_to_ids("<|im_start|>")
    ids = [tokenizer.eos_token_id, *tokenizer.encode("<step>a"), special, *tokenizer.encode("b</step>")]
    assert step_end_positions(ids, tokenizer) == [len(ids) - 1]


def test_padding_that_is_the_end_of_sequence_moves_nothing():
    ids = word_ids("<eos>", "<step>", "a", "</step>", "<step>", "<eos>", "b", "</step>", "<eos>")
    assert fused_words().pad_token_id == fused_words().eos_token_id
    assert step_end_positions([*ids, *word_ids("<eos>") * 5], fused_words()) == [3, 7]


def test_ids_after_the_end_of_sequence_are_read_as_they_stand():
    ids = word_ids("<step>", "a", "</step>", "<eos>", "<step>", "b", "</step>")
    assert step_end_positions(ids, fused_words()) == [2, 6]
    assert step_end_positions(ids[:4], fused_words()) == [2]


def test_a_token_that_completes_two_steps_appears_twice():
    tokenizer = byte_level()
    double = next(i for i, b in enumerate(token_bytes(tokenizer)) if b.count(b"<step></step>") == 2)
    ids = [double, *tokenizer.encode("<step>a</step>"), double]
    last = len(ids) - 1
    assert step_end_positions(ids, tokenizer) == [0, 0, last - 1, last, last]


def test_a_character_split_over_tokens_does_not_shift_the_ends():
    tokenizer = byte_level(vocab_size=257)  # bytes only
    text = "<step>√é→</step>é<step>²</step>"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    first, second = (text[: end + 7].encode() for end in (9, 24))
    assert step_end_positions(ids, tokenizer) == [len(first) - 1, len(second) - 1]


def test_a_token_that_ends_a_character_and_a_step_is_found_within_its_run():
    half = {i: bytes([b]) for i, b in enumerate("é".encode())}
    pieces = [*half.values(), b"<step>", b"\xa9</step>", b"</step>\xc3"]

    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return b"".join(pieces[i] for i in ids).decode(errors="replace")

    assert step_end_positions([2, 0, 3, 0, 1, 2, 0, 4, 1, 2, 1, 3], Bytes()) == [2, 7, 11]


def test_an_incomplete_character_at_the_end_changes_nothing():
    tokenizer = byte_level(vocab_size=257)
    ids = tokenizer.encode("<step>a</step>é")
    assert text_of(tokenizer, ids[:-1]).endswith("\ufffd")
    assert step_end_positions(ids[:-1], tokenizer) == [len("<step>a</step>") - 1]


def test_a_dropped_leading_space_does_not_shift_the_ends():
    for tokenizer in (metaspace(), byte_fallback()):
        ids = tokenizer.encode(" x <step> x = 5. </step> y <step> y </step> y", add_special_tokens=False)
        alone = "".join(text_of(tokenizer, [i]) for i in ids)
        assert alone != text_of(tokenizer, ids)  # the pieces on their own do not make up the text
        assert step_end_positions(ids, tokenizer) == ends_by_prefixes(ids, tokenizer)
        assert len(step_end_positions(ids, tokenizer)) == 2


def test_steps_that_do_not_count_have_no_end():
    ids = word_ids("<think>", "<step>", "a", "</step>", "<step>", "</think>", "<answer>", "<step>", "</step>")
    assert step_end_positions(ids, fused_words()) == [3]
    assert step_end_positions(word_ids("a", "<step>"), fused_words()) == []
    assert step_end_positions([], fused_words()) == []


def test_ids_may_come_as_a_tensor_or_without_a_cache():
    ids = word_ids("<step>", "a", "</step>", "<eos>")
    assert step_end_positions(torch.tensor(ids), fused_words()) == [2]
    assert step_end_positions(list(torch.tensor(ids)), fused_words()) == [2]
    assert step_end_positions(tuple(ids), ListTokenizer(WORDS)) == [2]


def test_tokens_added_after_the_first_call_are_read_right():
    raw = word_level(decoders.Fuse())
    unknown = len(WORDS)
    ids = [*word_ids("<step>", "a"), unknown, *word_ids("b", "</step>")]
    assert step_end_positions(ids, raw) == [4]
    raw.add_tokens(["</step><step>"])
    assert step_end_positions(ids, raw) == [2, 4]


# Against the references


def test_the_trained_merges_cross_tags():
    pieces = token_bytes(byte_level())
    assert any(b"</step>" in p and not p.endswith(b"</step>") for p in pieces)
    assert any(p.count(b"</step>") > 1 for p in pieces)
    assert any(b"\xef\xbf\xbd" in p.decode(errors="replace").encode() for p in pieces)


@settings(max_examples=150, deadline=None)
@given(texts, st.integers(0, 10**6))
def test_any_text_cut_into_bytes_agrees_with_its_bytes(text, cut):
    for vocab_size in (257, 300, 400):
        tokenizer = byte_level(vocab_size)
        ids = tokenizer.encode(text)
        head = cut % (len(text) + 1)  # a tokenisation that the tokenizer itself would not make
        for sampled in (ids, tokenizer.encode(text[:head]) + tokenizer.encode(text[head:])):
            assert step_end_positions(sampled, tokenizer) == ends_by_bytes(sampled, tokenizer)


def tag_heavy_ids(tokenizer) -> st.SearchStrategy[list[int]]:
    """Random ids, with those that hold part of a tag drawn more often."""
    size = tokenizer.get_vocab_size() if isinstance(tokenizer, Tokenizer) else len(tokenizer)
    tagged = [i for i in range(size) if any(part in text_of(tokenizer, [i]) for part in ("step>", "think>"))]
    opening = tokenizer.encode("<step>") if tokenizer is byte_level() else tagged[:1]
    anything, parts = st.integers(0, size - 1), st.sampled_from(tagged)
    return st.lists(
        st.one_of(anything.map(lambda i: [i]), parts.map(lambda i: [*opening, i])), max_size=20
    ).map(lambda groups: [i for group in groups for i in group])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_byte_level_ids_agree_with_their_bytes(data):
    ids = data.draw(tag_heavy_ids(byte_level()))
    assert step_end_positions(ids, byte_level()) == ends_by_bytes(ids, byte_level())


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_random_ids_agree_with_a_scan_over_all_prefixes(make):
    tokenizer = make()

    @settings(max_examples=80, deadline=None)
    @given(tag_heavy_ids(tokenizer))
    def check(ids):
        positions = step_end_positions(ids, tokenizer)
        assert positions == ends_by_prefixes(ids, tokenizer)
        assert len(positions) == len(split_steps(text_of(tokenizer, ids)))

    check()


@pytest.mark.parametrize("make", [byte_level, metaspace, byte_fallback])
def test_encoded_texts_agree_with_a_scan_over_all_prefixes(make):
    tokenizer = make()

    @settings(max_examples=80, deadline=None)
    @given(texts)
    def check(text):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert step_end_positions(ids, tokenizer) == ends_by_prefixes(ids, tokenizer)

    check()


# Cost


def test_a_known_vocabulary_costs_one_decode_per_completion():
    tokenizer = CountingTokenizer(fused_words())
    ids = [*word_ids("<step>", "1", "+", "2", "</step>") * 14, *word_ids("<eos>")]
    assert len(step_end_positions(ids, tokenizer)) == 14
    tokenizer.calls = 0
    step_end_positions(ids, tokenizer)
    assert tokenizer.calls == 1


def test_split_characters_cost_a_few_decodes_more():
    tokenizer = CountingTokenizer(byte_level(257))
    ids = byte_level(257).encode("<step>√</step>" * 50)
    step_end_positions(ids, tokenizer)
    tokenizer.calls = 0
    assert len(step_end_positions(ids, tokenizer)) == 50
    assert tokenizer.calls == 1 + 50


def test_context_dependent_pieces_cost_a_bisection_per_step():
    tokenizer = CountingTokenizer(metaspace())
    ids = metaspace().encode(" x <step> x </step>" * 50, add_special_tokens=False)
    step_end_positions(ids, tokenizer)
    tokenizer.calls = 0
    assert len(step_end_positions(ids, tokenizer)) == 50
    assert tokenizer.calls < 50 * (len(ids).bit_length() + 2) + len(ids)
