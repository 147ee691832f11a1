"""Tokens as they come: iterators, asyncio, transformers' streamers, threads, and the progress bar."""

import asyncio
import contextlib
import io
import random

import pytest
from transformers import ByT5Tokenizer, LogitsProcessor, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from pagedkv.engine.streams import TextPieces

from .conftest import build_llama
from .oracle import native, prompts


def test_streams_interleave_and_lose_nothing(llama, make_engine):
    engine = make_engine(llama)
    asked = prompts(3, 3, 20)
    streams = [engine.stream(prompt, max_new_tokens=9) for prompt in asked]
    got = [[] for _ in streams]
    for _ in range(9):
        for tokens, stream in zip(got, streams, strict=True):
            tokens.append(next(stream).token_id)
    assert got == [native(llama, prompt, max_new_tokens=9, do_sample=False) for prompt in asked]


def test_a_closed_stream_aborts_its_request(llama, make_engine):
    engine = make_engine(llama)
    stream = engine.stream([1, 2, 3], max_new_tokens=30)
    next(stream)
    assert engine.stats().num_running == 1
    stream.close()
    assert engine.stats().num_running == 0


def test_asyncio(llama, make_engine):
    engine = make_engine(llama)
    asked = prompts(6, 3, 20)

    async def consume(prompt):
        return [token.token_id async for token in engine.astream(prompt, max_new_tokens=9)]

    async def consume_all():
        return await asyncio.gather(*map(consume, asked))

    assert asyncio.run(consume_all()) == [native(llama, p, max_new_tokens=9, do_sample=False) for p in asked]
    assert engine.stats().num_steps < 30  # they ran together


def test_a_cancelled_consumer_leaves_the_others_alone(llama, make_engine):
    engine = make_engine(llama)

    async def main():
        async def consume(prompt, tokens):
            async for token in engine.astream(prompt, max_new_tokens=40):
                tokens.append(token.token_id)

        first, second = [], []
        doomed = asyncio.create_task(consume([1, 2, 3], first))
        other = asyncio.create_task(consume([4, 5, 6], second))
        while len(first) < 3:
            await asyncio.sleep(0.001)
        doomed.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await doomed
        await other
        return first, second

    first, second = asyncio.run(main())
    assert second == native(llama, [4, 5, 6], max_new_tokens=40, do_sample=False)
    expected = native(llama, [1, 2, 3], max_new_tokens=40, do_sample=False)
    assert first == expected[: len(first)]
    assert engine.stats().num_running == 0


def test_a_streamer_of_transformers(llama, make_engine):
    class Keep(BaseStreamer):
        def __init__(self):
            self.values, self.ended = [], 0

        def put(self, value):
            self.values.append(value.flatten().tolist())

        def end(self):
            self.ended += 1

    streamer, expected = Keep(), Keep()
    make_engine(llama).generate([[1, 2, 3]], max_new_tokens=5, streamer=streamer)
    native(llama, [1, 2, 3], max_new_tokens=5, do_sample=False, streamer=expected)
    assert streamer.values == expected.values
    assert streamer.ended == expected.ended == 1


def test_the_bar_shows_the_figures(llama, make_engine):
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        make_engine(llama).generate(prompts(3, 2, 9), max_new_tokens=20, progress=True)
    text = shown.getvalue()
    assert "3/3" in text
    for word in ("tokens/s", "running", "waiting", "KV"):
        assert word in text


def _byte_level():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def _cleaned():
    from tokenizers import Tokenizer, decoders, models

    words = ["[UNK]", "do", " n", "'t", "n't", ".", "I", "'", "ve", "'ve", "##ing", "a"]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)


def _byte_fallback():
    """As Llama 2 and Gemma: bytes of unknown characters are tokens, and a run that is no text is all unknown."""
    from tokenizers import Tokenizer, decoders, models

    words = ["a", "b", "\u2581c", *(f"<0x{byte:02X}>" for byte in (0xC3, 0xA9, 0xE4, 0xB8, 0xAD, 0x41))]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZERS = {"fast": _byte_level, "cleaned": _cleaned, "slow": ByT5Tokenizer, "bytes": _byte_fallback}


@pytest.mark.parametrize("build", TOKENIZERS.values(), ids=TOKENIZERS)
def test_pieces_joined_are_the_text_for_any_tokenizer_and_any_end(build):
    tokenizer = build()
    chance = random.Random(0)
    words = tokenizer("Zwölf Boxkämpfer jagen 中文 über 🙂🙂 den Deich. ")["input_ids"] if len(tokenizer) > 50 else []
    for length in [*range(1, 40), 300]:
        random_ids = [chance.randrange(len(tokenizer)) for _ in range(length)]
        for ids in [random_ids, (words * 10)[:length]]:
            pieces = TextPieces(tokenizer)
            given = [pieces.add(token, index == len(ids) - 1) for index, token in enumerate(ids)]
            assert "".join(given) == tokenizer.decode(ids, skip_special_tokens=True), ids


@pytest.mark.parametrize("tokenizer", [ByT5Tokenizer(), _byte_level()], ids=["slow", "fast"])
def test_a_stream_is_the_text_also_where_it_ends_inside_a_character(make_engine, tokenizer):
    model = build_llama(vocab_size=len(tokenizer))
    engine = make_engine(model, tokenizer)
    smile = tokenizer("🙂", add_special_tokens=False)["input_ids"]

    class Smiles(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, smile[(input_ids.shape[1] - 2) % 4]] = 1e9
            return scores

    for length in range(4, 10):
        options = {"max_new_tokens": length, "logits_processor": [Smiles()]}
        tokens = list(engine.stream([5, 6], **options))
        result = engine.generate([[5, 6]], **options)[0]
        assert [token.token_id for token in tokens] == result.token_ids == (smile * 3)[:length]
        assert "".join(token.text for token in tokens) == result.text
        assert tokens[3].text == "🙂"
        assert not any(token.text for token in tokens[:3])


def test_samples_of_a_streamed_request_have_texts_of_their_own(make_engine):
    tokenizer = ByT5Tokenizer()
    engine = make_engine(build_llama(vocab_size=len(tokenizer)), tokenizer)
    options = {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 3, "seed": 4}
    pieces = {}
    for token in engine.stream([5, 6], **options):
        pieces.setdefault(token.sample, []).append(token.text)
    results = engine.generate([[5, 6]], **options)
    assert {sample: "".join(texts) for sample, texts in pieces.items()} == {r.sample: r.text for r in results}
