"""Tests a server behind the bridge with the official Python client.

    client.py URL TRANSPORT SERVER [DIRECTORY]

TRANSPORT is http (the newest common revision), handshake (Streamable HTTP with initialize) or sse.
SERVER is the server behind the bridge. Prints every check that passes; the first failed check ends
the program.
"""

import asyncio
import json
import sys
import urllib.parse
from pathlib import Path

import mcp_types as types
from mcp import Client
from mcp.client.sse import sse_client
from mcp.shared.exceptions import MCPError

URL, TRANSPORT, SERVER = sys.argv[1:4]
DIRECTORY = Path(sys.argv[4]) if len(sys.argv) > 4 else Path()
TIMEOUT_SECONDS = 20


def ok(check):
    print("ok", check, flush=True)


def text(result):
    return "".join(part.text for part in result.content if part.type == "text")


async def on_sampling(_context, params):
    prompt = params.messages[0].content
    prompt = prompt[0] if isinstance(prompt, list) else prompt
    return types.CreateMessageResult(
        role="assistant",
        content=types.TextContent(type="text", text=f"model received: {prompt.text}"),
        model="test-model",
        stop_reason="endTurn",
    )


async def on_elicitation(_context, params):
    wanted = params.requested_schema["properties"]
    answers = {"name": "Ada", "username": "ada", "email": "ada@example.com", "color": "blue", "ok": True}
    return types.ElicitResult(action="accept", content={key: answers[key] for key in wanted if key in answers})


async def on_list_roots(_context):
    return types.ListRootsResult(roots=[types.Root(uri=DIRECTORY.as_uri(), name="work")])


def client(url, logs=None):
    async def on_log(params):
        if logs is not None:
            logs.append(params.data)

    return Client(
        sse_client(url) if TRANSPORT == "sse" else url,
        mode="auto" if TRANSPORT == "http" else "legacy",
        sampling_callback=on_sampling,
        elicitation_callback=on_elicitation,
        list_roots_callback=on_list_roots,
        logging_callback=on_log,
        log_level="debug",
        read_timeout_seconds=TIMEOUT_SECONDS,
    )


class InterruptingProxy:
    """TCP proxy to the gate that can abort all its connections."""

    def __init__(self, url):
        self.target = urllib.parse.urlsplit(url)
        self.open = set()
        self.cuts = 0

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        port = self.server.sockets[0].getsockname()[1]
        self.url = self.target._replace(netloc=f"127.0.0.1:{port}").geturl()
        return self

    async def __aexit__(self, *_):
        self.cut()
        self.server.close()

    async def serve(self, reader, writer):
        to_reader, to_writer = await asyncio.open_connection(self.target.hostname, self.target.port)
        pair = (writer, to_writer)
        self.open.add(pair)

        async def copy(source, sink):
            try:
                while data := await source.read(65536):
                    sink.write(data)
                    await sink.drain()
            except OSError:
                pass
            finally:
                sink.close()

        await asyncio.gather(copy(reader, to_writer), copy(to_reader, writer))
        self.open.discard(pair)

    def cut(self):
        self.cuts += 1
        for pair in list(self.open):
            for writer in pair:
                writer.transport.abort()


async def fixture():
    logs = []
    async with client(URL, logs) as session:
        expected = "2026-07-28" if TRANSPORT == "http" else "2025-11-25"
        assert session.protocol_version == expected, session.protocol_version
        ok("version")

        tools = [tool.name for tool in (await session.list_tools()).tools]
        assert "echo_raw" in tools and len(tools) > 30, tools
        answer = text(await session.call_tool("test_simple_text"))
        assert answer == "This is a simple text response for testing.", answer
        ok("tools")

        listed = await session.list_resources()
        assert listed.resources[0].uri == "test://static-text", listed
        read = await session.read_resource("test://template/7/data")
        assert '"id":"7"' in read.contents[0].text, read
        ok("resources")

        assert (await session.list_prompts()).prompts
        prompt = await session.get_prompt("test_prompt_with_arguments", {"arg1": "one", "arg2": "two"})
        assert prompt.messages[0].content.text.endswith("arg1='one', arg2='two'"), prompt
        ok("prompts")

        answer = text(await session.call_tool("test_sampling", {"prompt": "hello?"}))
        assert answer == "LLM response: model received: hello?", answer
        ok("sampling")

        answer = text(await session.call_tool("test_elicitation", {"message": "who?"}))
        assert '"username":"ada"' in answer.replace(" ", ""), answer
        ok("elicitation")

        answer = text(await session.call_tool("test_input_required_result_list_roots"))
        assert DIRECTORY.as_uri() in answer, answer
        ok("roots")

        seen = []

        async def on_progress(done, total, _message):
            seen.append((done, total))

        await session.call_tool("progress", {"steps": 5, "ms": 5}, progress_callback=on_progress)
        assert seen == [(step, 5) for step in range(1, 6)], seen
        ok("progress")

        await session.call_tool("log", {"level": "warning", "text": "over here", "count": 2})
        await until(lambda: logs.count("over here") == 2)
        ok("logging")

        note = DIRECTORY / f"cancelled-{TRANSPORT}"
        call = asyncio.create_task(session.call_tool("cancellable", {"file": str(note)}))
        await until(lambda: note.exists() and "started" in note.read_text())
        call.cancel()
        await until(lambda: "requestId" in note.read_text())
        answer = text(await session.call_tool("test_simple_text"))
        assert answer.startswith("This is"), answer
        ok("cancel")

        try:
            await session.call_tool("no_such_tool")
            raise AssertionError("the missing tool was called")
        except MCPError as error:
            assert error.code == -32602, error
        ok("error")

    if TRANSPORT == "handshake":
        await resume()


async def resume():
    async with InterruptingProxy(URL) as proxy:
        async with client(proxy.url) as session:
            seen = []

            async def on_progress(done, _total, _message):
                seen.append(done)
                if done == 3:
                    proxy.cut()

            answer = text(await session.call_tool("progress", {"steps": 40, "ms": 25}, progress_callback=on_progress))
            assert answer == "Done.", answer
            assert seen == list(range(1, 41)), seen
            assert proxy.cuts == 1
            ok("resume")


async def until(condition):
    for _ in range(TIMEOUT_SECONDS * 100):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("timed out")


async def everything():
    async with client(URL) as session:
        tools = [tool.name for tool in (await session.list_tools()).tools]
        assert "echo" in tools, tools
        answer = text(await session.call_tool("echo", {"message": "hi"}))
        assert answer == "Echo: hi", answer
        answer = text(await session.call_tool("get-sum", {"a": 2, "b": 40}))
        assert "42" in answer, answer
        ok("tools")
        image = await session.call_tool("get-tiny-image")
        assert any(part.type == "image" for part in image.content)
        ok("image")
        read = await session.read_resource("demo://resource/dynamic/text/1")
        assert read.contents[0].text, read
        ok("resources")
        prompts = [prompt.name for prompt in (await session.list_prompts()).prompts]
        prompt = await session.get_prompt(prompts[0])
        assert prompt.messages, prompt
        ok("prompts")
        answer = text(await session.call_tool("trigger-sampling-request", {"prompt": "hello?", "maxTokens": 50}))
        assert "model received" in answer, answer
        ok("sampling")
        answer = text(await session.call_tool("trigger-elicitation-request"))
        assert "Ada" in answer, answer
        ok("elicitation")
        seen = []

        async def on_progress(done, total, _message):
            seen.append((done, total))

        arguments = {"duration": 1, "steps": 4}
        await session.call_tool("trigger-long-running-operation", arguments, progress_callback=on_progress)
        assert seen == [(step, 4) for step in range(1, 5)], seen
        ok("progress")


async def filesystem():
    async with client(URL) as session:
        assert "read_text_file" in [tool.name for tool in (await session.list_tools()).tools]
        ok("tools")
        note = DIRECTORY / f"note-{TRANSPORT}.txt"
        await session.call_tool("write_file", {"path": str(note), "content": "größer ✓"})
        assert note.read_text() == "größer ✓"
        answer = text(await session.call_tool("read_text_file", {"path": str(note)}))
        assert answer == "größer ✓", answer
        ok("files")
        refused = await session.call_tool("read_text_file", {"path": "/etc/passwd"})
        assert refused.is_error, refused
        ok("refusal")


async def git():
    async with client(URL) as session:
        assert "git_log" in [tool.name for tool in (await session.list_tools()).tools]
        ok("tools")
        answer = text(await session.call_tool("git_log", {"repo_path": str(DIRECTORY), "max_count": 1}))
        assert "A first commit" in answer, answer
        (DIRECTORY / "fresh.txt").write_text("fresh\n")
        answer = text(await session.call_tool("git_status", {"repo_path": str(DIRECTORY)}))
        assert "fresh.txt" in answer, answer
        ok("repository")


async def time():
    async with client(URL) as session:
        assert "convert_time" in [tool.name for tool in (await session.list_tools()).tools]
        ok("tools")
        arguments = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
        answer = json.loads(text(await session.call_tool("convert_time", arguments)))
        assert "T21:00" in answer["target"]["datetime"], answer
        ok("conversion")


asyncio.run(globals()[SERVER]())
