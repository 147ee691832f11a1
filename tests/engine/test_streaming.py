"""Tokens as they come: iterators, asyncio, transformers' streamers, threads, and the progress bar."""

import asyncio
import contextlib
import io
import threading

from transformers.generation.streamers import BaseStreamer

from .oracle import assert_native, native, prompts


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


def test_threads(llama, make_engine):
    engine = make_engine(llama, num_blocks=40)
    results = {}

    def work(number):
        results[number] = engine.generate(prompts(4, 2, 20, seed=number), max_new_tokens=10)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_native(llama, [result for number in range(3) for result in results[number]], max_new_tokens=10)


def test_the_bar_shows_the_figures(llama, make_engine):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        make_engine(llama).generate(prompts(3, 2, 9), max_new_tokens=20, progress=True)
    text = shown.getvalue()
    assert "3/3" in text
    for word in ("tokens/s", "running", "waiting", "KV"):
        assert word in text
