"""Tests `palisade mcp` over stdio with the official Python client.

    client.py FUNCTION MODE COMMAND…

FUNCTION is a function below; MODE is auto (the newest revision) or legacy (initialize). Prints every
check that passes; the first failed check ends the program.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from mcp import Client, StdioServerParameters
from mcp.shared.exceptions import MCPError

FUNCTION, MODE, COMMAND = sys.argv[1], sys.argv[2], sys.argv[3:]
TIMEOUT_SECONDS = 60
INVALID_PARAMS = -32602


def ok(check):
    print("ok", check, flush=True)


def text(result):
    return "".join(part.text for part in result.content if part.type == "text")


def client():
    server = StdioServerParameters(command=COMMAND[0], args=COMMAND[1:], cwd=Path.cwd())
    return Client(server, mode=MODE, read_timeout_seconds=TIMEOUT_SECONDS)


class Session:
    """Calls that must succeed, and calls that must fail."""

    def __init__(self, session):
        self.session = session

    async def succeeds(self, tool, **arguments):
        result = await self.session.call_tool(tool, arguments)
        assert not result.is_error, f"{tool} {arguments}: {text(result)}"
        return result.structured_content

    async def fails(self, tool, **arguments):
        """Returns the error message of the tool."""
        result = await self.session.call_tool(tool, arguments)
        assert result.is_error, f"{tool} {arguments}: {text(result)}"
        return text(result)

    async def refused(self, tool, **arguments):
        """Returns the message of the invalid_params error."""
        try:
            result = await self.session.call_tool(tool, arguments)
        except MCPError as error:
            assert error.code == INVALID_PARAMS, f"{tool} {arguments}: {error.code} {error}"
            return str(error)
        raise AssertionError(f"{tool} {arguments}: {text(result)}")


async def full_session(session):
    made = await session.succeeds("sandbox-create", name="Fix It")
    assert made["sandbox"]["name"] == "fix-it", made
    assert made["sandbox"]["branch"] == "palisade/fix-it", made
    ok("create")

    written = await session.succeeds("write", path="src/new/main.py", content="print('hello')\n")
    assert written["bytes"] == 15 and written["commit"], written
    again = await session.succeeds("write", path="src/new/main.py", content="print('hello')\n")
    assert "commit" not in again, again
    ok("write")

    ran = await session.succeeds("bash", command="python3 src/new/main.py > out.txt; cat out.txt; pwd")
    assert ran["output"] == "hello\n/workspace\n" and ran["exit_code"] == 0 and ran["commit"], ran
    quiet = await session.succeeds("bash", command="true")
    assert "commit" not in quiet, quiet
    ok("bash")

    read = await session.succeeds("read", path="src/lib.rs", offset=2, limit=1)
    assert read["content"].rstrip("\n") == "two" and read["hasMore"], read
    ok("read")

    found = await session.succeeds("grep", pattern="print", glob="*.py")
    assert found["content"] == "src/new/main.py:1: print('hello')", found
    files = await session.succeeds("glob", pattern="**/*.py")
    assert files["files"] == ["src/new/main.py"], files
    listed = await session.succeeds("ls", path="src")
    assert listed["output"].split() == ["lib.rs", "new/"], listed
    ok("grep")

    edited = await session.succeeds("edit", path="src/new/main.py", oldText="hello", newText="goodbye")
    assert "+1 print('goodbye')" in edited["diff"] and edited["commit"], edited
    ok("edit")

    patch = (
        "--- a/README.md\n+++ b/README.md\n@@ -1 +1,2 @@\n hello\n+world\n"
        "--- /dev/null\n+++ b/docs/new.md\n@@ -0,0 +1 @@\n+new\n"
    )
    patched = await session.succeeds("patch", patch=patch)
    assert patched["files"] == ["README.md", "docs/new.md"] and patched["commit"], patched
    patch = "--- a/docs/new.md\n+++ b/docs/new.md\n@@ -1,7 +1,9 @@\n new\n+wrong counts\n"
    patched = await session.succeeds("patch", patch=patch)
    assert patched["files"] == ["docs/new.md"], patched
    ok("patch")

    diff = await session.succeeds("diff")
    kinds = {file["path"]: file["kind"] for file in diff["files"]}
    expected = {"README.md": "M", "docs/new.md": "A", "out.txt": "A", "src/new/main.py": "A"}
    assert kinds == expected, kinds
    assert "+print('goodbye')" in diff["patch"], diff
    stat = await session.succeeds("diff", stat=True)
    assert stat["patch"] == "" and len(stat["files"]) == 4, stat
    ok("diff")

    listed = await session.succeeds("sandbox-list")
    assert [one["name"] for one in listed["sandboxes"]] == ["fix-it"], listed
    ports = await session.succeeds("sandbox-ports")
    assert ports == {"open": [], "published": []}, ports
    paused = await session.succeeds("sandbox-pause", sandbox="fix-it")
    assert paused["sandbox"]["status"] == "paused", paused
    assert "paused" in await session.fails("bash", command="true")
    resumed = await session.succeeds("sandbox-resume")
    assert resumed["sandbox"]["status"] == "active", resumed
    ok("states")


async def sandbox_of_another_session(session):
    """A sandbox of another session can be used but not deleted."""
    message = await session.fails("sandbox-delete", sandbox="fix-it", force=True)
    assert "not made in this session" in message, message
    await session.succeeds("bash", sandbox="fix-it", command="true")
    message = await session.fails("sandbox-delete", sandbox="fix-it")
    assert "commit" in message, message
    ok("kept")


async def delete_sandboxes(session):
    """Deletion needs force if commits would be lost."""
    await session.succeeds("sandbox-create", name="brief")
    await session.succeeds("write", path="a.txt", content="a\n")
    message = await session.fails("sandbox-delete")
    assert "commit" in message, message
    deleted = await session.succeeds("sandbox-delete", force=True)
    assert deleted["name"] == "brief" and deleted["tip"], deleted
    await session.succeeds("sandbox-create", name="empty")
    await session.succeeds("sandbox-delete")
    assert (await session.succeeds("sandbox-list"))["sandboxes"] == []
    ok("delete")


async def errors(session):
    message = await session.refused("bash", command="true")
    assert "none was made in this session" in message, message
    assert "Invalid sandbox name" in await session.refused("sandbox-create", name="///")
    assert "not found" in await session.refused("bash", sandbox="missing", command="true")
    assert "not found" in await session.refused("sandbox-delete", sandbox="missing")
    for more in ({"repos": ["a/b"]}, {"auth_mode": "bot"}, {"backend": "docker"}, {"root": True}):
        message = await session.refused("sandbox-create", name="more", **more)
        assert "unknown field" in message, message
    await session.succeeds("sandbox-create", name="one")
    assert "already exists" in await session.refused("sandbox-create", name="one")
    ok("names")

    assert "No such file" in await session.refused("read", path="nothing")
    assert "No such file" in await session.refused("ls", path="nothing")
    assert "No such file" in await session.refused("edit", path="nothing", oldText="a", newText="b")
    for path in ("../x", "../../etc/passwd"):
        message = await session.refused("write", path=path, content="x")
        assert "outside workspace" in message, message
    await session.refused("read")
    await session.refused("read", path=7)
    await session.refused("no-such-tool")
    ok("paths")

    message = await session.fails("edit", path="README.md", oldText="absent", newText="b")
    assert message.startswith("Could not find the exact text in README.md."), message
    message = await session.fails("edit", path="src/lib.rs", oldText="e", newText="b")
    assert message.startswith("Found "), message
    message = await session.fails("patch", patch="--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-no\n+yes\n")
    assert "README.md" in message, message
    message = await session.fails("patch", patch="no patch at all")
    assert message, message
    result = await session.session.call_tool("bash", {"command": "echo said; echo so >&2; exit 7"})
    assert result.is_error and result.structured_content["exit_code"] == 7, result
    assert sorted(result.structured_content["output"].split()) == ["said", "so"], result
    assert result.structured_content["stdout"] == "said\n", result
    assert result.structured_content["stderr"] == "so\n", result
    result = await session.session.call_tool("bash", {"command": "sleep 600", "timeoutSeconds": 0.5})
    assert result.is_error and result.structured_content["timed_out"], result
    ok("tools")

    await session.succeeds("sandbox-create", name="two")
    message = await session.refused("bash", command="true")
    assert "2 were made in this session" in message, message
    ok("which")


async def transfers(session):
    await session.succeeds("sandbox-create", name="files")
    for path in ("../outside", "/etc/passwd", ".git/config", ".git", ".GIT/config", "link", "linked/a", "sub/../../outside"):
        message = await session.refused("upload", source=path)
        assert message, message
    await session.refused("upload", source="nothing")
    ok("upload escapes")

    moved = await session.succeeds("upload", source="untracked", to="in")
    assert moved["files"] == 2, moved
    assert any(".git" in note for note in moved["leftOut"]), moved
    ran = await session.succeeds("bash", command="cd in && find . -type f | sort && cat untracked/a.bin | wc -c")
    assert ran["output"].split() == ["./untracked/a.bin", "./untracked/deep/b", "4"], ran
    moved = await session.succeeds("upload", source="big.log")
    assert moved["files"] == 1 and "commit" not in moved, moved
    ok("upload")

    await session.succeeds("bash", command="mkdir -p made/.git .vscode && echo made > made/a.txt && touch made/.git/config && echo {} > .vscode/tasks.json && ln -s /etc made/etc && echo new > README.md")
    for to in ("..", "/tmp", ".git", ".git/hooks", "link", "linked", "linked/deeper"):
        message = await session.refused("download", source="made", to=to)
        assert message, message
    await session.refused("download", source="nothing")
    assert "already exists" in await session.fails("download", source="README.md")
    message = await session.fails("download", source=".vscode")
    assert "configures tools" in message, message
    ok("download escapes")

    moved = await session.succeeds("download", source="made", to="results/here")
    assert moved["files"] == 1, moved
    notes = " ".join(moved["leftOut"])
    assert ".git" in notes and "etc" in notes, moved
    ok("download")


async def cancel(session):
    """A cancelled call ends its command; its changes are committed."""
    await session.succeeds("sandbox-create", name="patient")
    line = "echo begun > begun.txt; sleep 4321"
    call = asyncio.create_task(session.session.call_tool("bash", {"command": line}))
    while "begun.txt" not in (await session.succeeds("ls"))["output"]:
        await asyncio.sleep(0.02)
    call.cancel()
    # The cancelled call commits its changes before another call does.
    log = ["git", "log", "--format=%s", "main..palisade/patient"]
    for _ in range(TIMEOUT_SECONDS * 50):
        if subprocess.run(log, capture_output=True, check=True).stdout:
            break
        await asyncio.sleep(0.02)
    else:
        raise AssertionError("the changes were not committed")
    for _ in range(TIMEOUT_SECONDS * 50):
        found = await session.succeeds("bash", command="pgrep -fx 'sleep 432[1]' || echo none")
        if found["output"] == "none\n":
            break
        await asyncio.sleep(0.02)
    else:
        raise AssertionError("the command still runs")
    ok("cancel")


async def concurrent_writes(session):
    """Concurrent writes are all committed, in separate or shared commits."""
    await session.succeeds("sandbox-create", name="busy")
    names = [f"{number}.txt" for number in range(12)]
    await asyncio.gather(*(session.succeeds("write", path=name, content=name) for name in names))
    diff = await session.succeeds("diff", stat=True)
    assert sorted(file["path"] for file in diff["files"]) == sorted(names), diff
    ok("concurrent writes")


async def describe_tools(session):
    tools = {tool.name: tool for tool in (await session.session.list_tools()).tools}
    print(json.dumps(sorted(tools)))
    for tool in tools.values():
        assert tool.description and tool.title, tool
        assert tool.input_schema["type"] == "object", tool
        assert tool.input_schema["additionalProperties"] is False, tool
        assert tool.output_schema["type"] == "object", tool
        assert tool.annotations.read_only_hint is not None, tool
        assert "null" not in json.dumps(tool.input_schema), tool.input_schema
        assert "unknown field" in await session.refused(tool.name, nonsense=1)
    assert tools["read"].annotations.read_only_hint
    assert tools["sandbox-delete"].annotations.destructive_hint
    assert "sandbox-create" in (session.session.instructions or ""), session.session.instructions
    ok("descriptions")


async def main():
    async with client() as session:
        await globals()[FUNCTION](Session(session))


asyncio.run(main())
