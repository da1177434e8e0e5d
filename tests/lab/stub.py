"""A stand-in for an OpenAI-compatible server: streams words at a set pace, in a process of its own.

python tests/lab/stub.py [--first SECONDS] [--gap SECONDS] [--fail-every N] [--piece N] [--loss SHARE]

`--fail-every N` answers HTTP 500 to each Nth request, `--piece` sends that many tokens at a time, `--loss` makes
that share of greedy choices differ (a lossy engine). Written on bare asyncio so that it can outrun the load generator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import zlib


class Stub:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                _, path, _ = head.split(b" ", 2)
                length = next((int(x[15:]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length:")), 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                await self.answer(path.decode(), body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, path: str, body: dict, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            return self.reply(writer, 200, json.dumps({"data": [{"id": "stub"}]}))
        if path == "/metrics":
            return self.reply(writer, 200, f"stub_requests_total {self.asked}\n")
        self.asked += 1
        every = self.options.fail_every
        if every and self.asked % every == 0:
            return self.reply(writer, 500, json.dumps({"error": {"message": "the stub fails on purpose"}}))
        if not body.get("stream"):
            return self.reply(writer, 200, json.dumps(self.logprobs(body)))
        await self.stream(body, writer, "chat" in path)

    def reply(self, writer: asyncio.StreamWriter, status: int, text: str) -> None:
        data = text.encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(data)) + data)

    async def stream(self, body: dict, writer: asyncio.StreamWriter, chat: bool) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if chat:
            self.event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await self.pause(self.options.first)
        prompt = json.dumps(body.get("messages") or body["prompt"])
        words, sent = body["max_tokens"], 0
        while sent < words:
            if sent:
                await self.pause(self.options.gap)
            count = min(self.options.piece, words - sent)
            text = "".join(f"w{i} " for i in range(sent, sent + count))
            sent += count
            self.event(writer, {"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
        usage = {"prompt_tokens": len(prompt) // 4, "completion_tokens": words}
        self.event(writer, {"choices": [], "usage": usage})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def event(self, writer: asyncio.StreamWriter, chunk: dict) -> None:
        data = b"data: " + json.dumps(chunk).encode() + b"\n\n"
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def pause(self, seconds: float) -> None:
        if seconds:
            await asyncio.sleep(seconds)

    def logprobs(self, body: dict) -> dict:
        """A completion with logprobs over a vocabulary of three words; what is lost depends on the position."""
        words = body["prompt"].split() if body.get("echo") else []
        tokens = words + [f"w{i}" for i in range(body["max_tokens"])]
        top, chosen = [], []
        for i, token in enumerate(tokens):
            lossy = (zlib.crc32(f"{i}".encode()) % 1000) / 1000 < self.options.loss
            best, other = ("other", token) if lossy else (token, "other")
            ranks = {best: math.log(0.6), other: math.log(0.3), "rest": math.log(0.1)}
            top.append(ranks)
            chosen.append(ranks[token])
        if words:
            top[0] = chosen[0] = None
        logprobs = {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top}
        return {"choices": [{"text": " ".join(tokens), "logprobs": logprobs}]}


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=float, default=0.0)
    parser.add_argument("--gap", type=float, default=0.0)
    parser.add_argument("--fail-every", type=int, default=0)
    parser.add_argument("--piece", type=int, default=1)
    parser.add_argument("--loss", type=float, default=0.0)
    server = await asyncio.start_server(Stub(parser.parse_args()).serve, "127.0.0.1", 0, limit=1 << 26)
    print(f"ready at http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
