// Tests a server behind the bridge with the official TypeScript client.
//
//     client.mjs URL TRANSPORT SERVER [DIRECTORY]
//
// TRANSPORT is http (Streamable HTTP) or sse. SERVER is the server behind the bridge. Prints every
// check that passes; the first failed check ends the program. PALISADE_MCP is the directory in which
// tests/mcp/install installed the packages.
import assert from 'node:assert/strict';
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import net from 'node:net';
import { join } from 'node:path';
import { setTimeout as pause } from 'node:timers/promises';
import { pathToFileURL } from 'node:url';

const require = createRequire(join(process.env.PALISADE_MCP, 'package.json'));
const load = (name) => import(pathToFileURL(require.resolve(`@modelcontextprotocol/sdk/${name}`)).href);
const { Client } = await load('client/index.js');
const { StreamableHTTPClientTransport } = await load('client/streamableHttp.js');
const { SSEClientTransport } = await load('client/sse.js');
const types = await load('types.js');

const [url, transportName, server, directory = '.'] = process.argv.slice(2);
const timeoutMs = 20_000;
const ok = (check) => console.log('ok', check);
const text = (result) =>
  result.content
    .filter((part) => part.type === 'text')
    .map((part) => part.text)
    .join('');

async function until(condition) {
  for (let left = timeoutMs; left > 0; left -= 10) {
    if (condition()) return;
    await pause(10);
  }
  assert.fail('timed out');
}

const steps = (count) => Array.from({ length: count }, (_, n) => n + 1);

async function connect(to = url) {
  const client = new Client(
    { name: 'test', version: '1' },
    { capabilities: { sampling: {}, elicitation: {}, roots: {} } },
  );
  client.setRequestHandler(types.CreateMessageRequestSchema, async ({ params }) => ({
    role: 'assistant',
    content: { type: 'text', text: `model received: ${[params.messages[0].content].flat()[0].text}` },
    model: 'test-model',
    stopReason: 'endTurn',
  }));
  client.setRequestHandler(types.ElicitRequestSchema, async ({ params }) => {
    const answers = { name: 'Ada', username: 'ada', email: 'ada@example.com', color: 'blue', ok: true };
    const wanted = Object.keys(params.requestedSchema.properties).filter((key) => key in answers);
    return { action: 'accept', content: Object.fromEntries(wanted.map((key) => [key, answers[key]])) };
  });
  client.setRequestHandler(types.ListRootsRequestSchema, async () => ({
    roots: [{ uri: pathToFileURL(directory).href, name: 'work' }],
  }));
  const quick = { initialReconnectionDelay: 10, maxReconnectionDelay: 100, reconnectionDelayGrowFactor: 1, maxRetries: 20 };
  const transport =
    transportName === 'sse'
      ? new SSEClientTransport(new URL(to))
      : new StreamableHTTPClientTransport(new URL(to), { reconnectionOptions: quick });
  await client.connect(transport);
  return { client, transport };
}

// TCP proxy to the gate that can abort all its connections.
async function interruptingProxy() {
  const { hostname, port } = new URL(url);
  const open = new Set();
  const relay = net.createServer((from) => {
    const to = net.connect(Number(port), hostname);
    for (const socket of [from, to]) {
      open.add(socket);
      socket.on('error', () => {});
      socket.on('close', () => open.delete(socket));
    }
    from.pipe(to);
    to.pipe(from);
  });
  await new Promise((resolve) => relay.listen(0, '127.0.0.1', resolve));
  const to = new URL(url);
  to.port = String(relay.address().port);
  to.hostname = '127.0.0.1';
  const cut = () => open.forEach((socket) => socket.resetAndDestroy());
  return { url: to.href, cut, close: () => (cut(), relay.close()) };
}

const servers = {
  async fixture() {
    const { client, transport } = await connect();
    const logs = [];
    client.setNotificationHandler(types.LoggingMessageNotificationSchema, ({ params }) => logs.push(params.data));

    const { tools } = await client.listTools();
    assert(tools.some((tool) => tool.name === 'echo_raw') && tools.length > 30);
    assert.equal(text(await client.callTool({ name: 'test_simple_text' })), 'This is a simple text response for testing.');
    ok('tools');

    assert.equal((await client.listResources()).resources[0].uri, 'test://static-text');
    const read = await client.readResource({ uri: 'test://template/7/data' });
    assert.match(read.contents[0].text, /"id":"7"/);
    ok('resources');

    assert((await client.listPrompts()).prompts.length);
    const prompt = await client.getPrompt({ name: 'test_prompt_with_arguments', arguments: { arg1: 'one', arg2: 'two' } });
    assert.match(prompt.messages[0].content.text, /arg1='one', arg2='two'$/);
    ok('prompts');

    const sampled = await client.callTool({ name: 'test_sampling', arguments: { prompt: 'hello?' } });
    assert.equal(text(sampled), 'LLM response: model received: hello?');
    ok('sampling');

    const elicited = await client.callTool({ name: 'test_elicitation', arguments: { message: 'who?' } });
    assert.match(text(elicited), /"username":\s*"ada"/);
    ok('elicitation');

    const roots = text(await client.callTool({ name: 'test_input_required_result_list_roots' }));
    assert(roots.includes(pathToFileURL(directory).href), roots);
    ok('roots');

    const seen = [];
    const received = join(directory, `received-js-${transportName}`);
    const onprogress = ({ progress, total }) => {
      seen.push(progress);
      if (progress === total) writeFileSync(received, '');
    };
    await client.callTool({ name: 'progress', arguments: { steps: 5, ms: 5, until: received } }, undefined, { onprogress });
    assert.deepEqual(seen, steps(5));
    ok('progress');

    await client.setLoggingLevel('info');
    await client.callTool({ name: 'log', arguments: { level: 'debug', text: 'too quiet' } });
    await client.callTool({ name: 'log', arguments: { level: 'warning', text: 'over here', count: 2 } });
    await until(() => logs.length >= 2);
    assert.deepEqual(logs, ['over here', 'over here']);
    ok('logging');

    let changed = 0;
    client.setNotificationHandler(types.ToolListChangedNotificationSchema, () => (changed += 1));
    await client.callTool({ name: 'list_changed', arguments: { what: 'tools' } });
    await until(() => changed === 1);
    ok('list changed');

    await client.subscribeResource({ uri: 'test://watched-resource' });
    let updated = '';
    client.setNotificationHandler(types.ResourceUpdatedNotificationSchema, ({ params }) => (updated = params.uri));
    await client.callTool({ name: 'list_changed', arguments: { what: 'test://watched-resource' } });
    await until(() => updated === 'test://watched-resource');
    ok('subscription');

    const note = join(directory, `cancelled-js-${transportName}`);
    const stop = new AbortController();
    const call = client.callTool({ name: 'cancellable', arguments: { file: note } }, undefined, { signal: stop.signal });
    await until(() => existsSync(note) && readFileSync(note, 'utf8').includes('started'));
    stop.abort('enough');
    await assert.rejects(call);
    await until(() => readFileSync(note, 'utf8').includes('requestId'));
    assert.match(text(await client.callTool({ name: 'test_simple_text' })), /^This is/);
    ok('cancel');

    await assert.rejects(client.callTool({ name: 'no_such_tool' }), (error) => error.code === -32602);
    ok('error');

    // Concurrent calls: each answer goes to its own call.
    const many = Array.from({ length: 50 }, (_, n) => client.callTool({ name: 'echo_raw', arguments: { n } }));
    (await Promise.all(many)).forEach((result, n) => assert.equal(result.structuredContent.n, n));
    ok('concurrency');

    if (transportName === 'http') await transport.terminateSession();
    await client.close();
    // Over SSE this client reconnects without Last-Event-ID.
    if (transportName === 'http') await servers.resume();
  },

  async resume() {
    const relay = await interruptingProxy();
    const { client } = await connect(relay.url);
    const seen = [];
    const onprogress = ({ progress }) => {
      seen.push(progress);
      if (progress === 3) relay.cut();
    };
    const request = { name: 'progress', arguments: { steps: 40, ms: 25 } };
    const result = await client.callTool(request, undefined, { onprogress, timeout: timeoutMs });
    assert.equal(text(result), 'Done.');
    assert.deepEqual(seen, steps(40));
    ok('resume');
    await client.close();
    relay.close();
  },

  async everything() {
    const { client } = await connect();
    assert.equal(text(await client.callTool({ name: 'echo', arguments: { message: 'hi' } })), 'Echo: hi');
    assert.match(text(await client.callTool({ name: 'get-sum', arguments: { a: 2, b: 40 } })), /42/);
    ok('tools');
    const image = await client.callTool({ name: 'get-tiny-image' });
    assert(image.content.some((part) => part.type === 'image'));
    ok('image');
    const read = await client.readResource({ uri: 'demo://resource/dynamic/text/1' });
    assert(read.contents[0].text);
    ok('resources');
    const { prompts } = await client.listPrompts();
    assert((await client.getPrompt({ name: prompts[0].name })).messages.length);
    ok('prompts');
    const sampled = await client.callTool({ name: 'trigger-sampling-request', arguments: { prompt: 'hello?', maxTokens: 50 } });
    assert.match(text(sampled), /model received/);
    ok('sampling');
    assert.match(text(await client.callTool({ name: 'trigger-elicitation-request' })), /Ada/);
    ok('elicitation');
    const seen = [];
    const onprogress = ({ progress }) => seen.push(progress);
    const long = { name: 'trigger-long-running-operation', arguments: { duration: 1, steps: 4 } };
    await client.callTool(long, undefined, { onprogress });
    // This client handles notifications that arrive in one read with the result after the result.
    assert(seen.length >= 1);
    assert.deepEqual(seen, steps(seen.length));
    ok('progress');
    await client.close();
  },

  async filesystem() {
    const { client } = await connect();
    const { tools } = await client.listTools();
    assert(tools.some((tool) => tool.name === 'read_text_file'));
    ok('tools');
    const note = join(directory, `note-js-${transportName}.txt`);
    await client.callTool({ name: 'write_file', arguments: { path: note, content: 'größer ✓' } });
    assert.equal(readFileSync(note, 'utf8'), 'größer ✓');
    assert.equal(text(await client.callTool({ name: 'read_text_file', arguments: { path: note } })), 'größer ✓');
    ok('files');
    const refused = await client.callTool({ name: 'read_text_file', arguments: { path: '/etc/passwd' } });
    assert.equal(refused.isError, true);
    ok('refusal');
    await client.close();
  },

  async git() {
    const { client } = await connect();
    const { tools } = await client.listTools();
    assert(tools.some((tool) => tool.name === 'git_log'));
    ok('tools');
    const log = { name: 'git_log', arguments: { repo_path: directory, max_count: 1 } };
    assert.match(text(await client.callTool(log)), /A first commit/);
    writeFileSync(join(directory, 'fresh.txt'), 'fresh\n');
    assert.match(text(await client.callTool({ name: 'git_status', arguments: { repo_path: directory } })), /fresh\.txt/);
    ok('repository');
    await client.close();
  },

  async time() {
    const { client } = await connect();
    const { tools } = await client.listTools();
    assert(tools.some((tool) => tool.name === 'convert_time'));
    ok('tools');
    const convert = { source_timezone: 'UTC', time: '12:00', target_timezone: 'Asia/Tokyo' };
    assert.match(text(await client.callTool({ name: 'convert_time', arguments: convert })), /T21:00/);
    ok('conversion');
    await client.close();
  },
};

await servers[server]();
process.exit(0);
