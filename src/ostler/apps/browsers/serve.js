// Browsers behind Playwright's own server, driven by driver.py over stdin and stdout (a line of JSON each way).
// Run by the Node of any Playwright driver: `node serve.js /path/to/driver/package`. It uses Playwright's public API, so old and new drivers
// behave the same: launchServer isolates clients from each other, and a monitor connection asks the browser itself whether it is well.

'use strict';

const { AsyncLocalStorage, AsyncResource } = require('node:async_hooks');
const fs = require('node:fs');
const http = require('node:http');
const readline = require('node:readline');

const { Lines, farewell } = require('./line.js');
const playwright = require(process.argv[2]);
const browsers = new Map(); // by name
const session = new AsyncLocalStorage(); // which session the code that runs now works for

const lines = new Lines(); // connections, which the relay may lend us

const say = (message) => process.stdout.write(JSON.stringify(message) + '\n');

// Each WebSocket server listens on a socket of its browser's name, so the upgrade says which browser and, by a header of the relay, which session.
const emit = http.Server.prototype.emit;
http.Server.prototype.emit = function (event, request, socket, ...rest) {
  if (event === 'connection' && request.server === this) request = lines.wrap(request);
  if (event === 'upgrade') {
    const browser = [...browsers.values()].find((one) => one.listens === this.address());
    if (!browser || browser.dead) { // refused before a byte, so that the relay tries another worker
      socket.destroy();
      return true;
    }
    const id = request.headers['x-ostler-session'];
    if (!request.url.includes('ostler-monitor')) {
      browser.sockets.add(socket);
      socket.once('close', () => browser.sockets.delete(socket));
    }
    if (id) {
      lines.upgraded(id, socket, rest[0]);
      session.run(id, () => { socket.emit = AsyncResource.bind(socket.emit, 'session', socket); });
    }
  }
  return emit.call(this, event, request, socket, ...rest);
};

// A context of a shared browser belongs to the session that opens the first page in it.
function watchPages(name, pipe) {
  const write = pipe.write;
  pipe.write = function (data, ...rest) {
    if (typeof data === 'string' && data.length < 2000 && data.includes('"Target.createTarget"') && session.getStore()) {
      const context = /"browserContextId":"(\w+)"/.exec(data);
      if (context) say({ event: 'context', browser: name, session: session.getStore(), context: context[1] });
    }
    return write.call(this, data, ...rest);
  };
}

function tell(socket, text) {
  if (socket.writable) socket.end(farewell(text));
}

function gone(name, code, signal) {
  const browser = browsers.get(name);
  if (!browser) return;
  browsers.delete(name);
  try { process.kill(-browser.pid, 'SIGKILL'); } catch {} // what it has left of itself
  say({ event: 'gone', browser: name, code, signal });
}

async function watch(name, kind, browser, child) {
  if (child.exitCode !== null || child.signalCode !== null) throw new Error('the browser died at once');
  const pipe = child.stdio[4];
  if (pipe) {
    pipe.prependListener('close', () => {
      browser.dead = true;
      for (const socket of browser.sockets) tell(socket, browser.said || 'ostler: the browser died');
    });
  }
  if (child.stdio[3]) watchPages(name, child.stdio[3]);
  browser.monitor = await playwright[kind].connect(`ws+unix://${fs.realpathSync('.')}/${name}:/?ostler-monitor`);
  if (kind === 'chromium') {
    browser.cdp = await browser.monitor.newBrowserCDPSession();
    browser.cdp.on('Target.receivedMessageFromTarget', (params) => say({ event: 'target', browser: name, params }));
    browser.cdp.on('Target.targetCreated', ({ targetInfo }) => say({ event: 'created', browser: name, target: targetInfo.targetId }));
    browser.cdp.on('Target.targetDestroyed', ({ targetId }) => say({ event: 'destroyed', browser: name, target: targetId }));
    await browser.cdp.send('Target.setDiscoverTargets', { discover: true, filter: [{ type: 'page' }] });
  } else {
    browser.page = await browser.monitor.newPage();
  }
}

const commands = {
  async ping() {},
  async launch({ name, kind, options }) {
    const server = await playwright[kind].launchServer({ ...options, port: name, wsPath: '/', handleSIGINT: false, handleSIGTERM: false, handleSIGHUP: false });
    const child = server.process();
    const browser = { server, pid: child.pid, sockets: new Set(), listens: name, said: null, dead: false };
    browsers.set(name, browser);
    server.on('close', (code, signal) => gone(name, code, signal));
    try {
      await watch(name, kind, browser, child);
    } catch (error) {
      await server.kill();
      throw error;
    }
    return { pid: child.pid };
  },
  // A question that only the browser can answer.
  async ask({ name }) {
    const browser = browsers.get(name);
    await (browser.cdp ? browser.cdp.send('Browser.getVersion') : browser.page.evaluate('1'));
  },
  async send({ name, method, params }) {
    return await browsers.get(name).cdp.send(method, params);
  },
  // Ends it now: its clients have gone, or are told why.
  async kill({ name, text }) {
    const browser = browsers.get(name);
    if (!browser) return;
    browser.dead = true;
    browser.said = text;
    if (text) for (const socket of browser.sockets) tell(socket, text);
    await browser.server.kill();
  },
};

async function obey(line) {
  const { id, do: verb, ...given } = JSON.parse(line);
  try {
    say({ id, ok: (await commands[verb](given)) ?? null });
  } catch (error) {
    say({ id, error: String(error.message || error) });
  }
}

process.stdin.on('error', () => {});
process.stdout.on('error', () => process.exit(1));
process.on('unhandledRejection', () => {}); // a client or a browser that left in the middle of something
for (const name of ['SIGINT', 'SIGTERM', 'SIGHUP']) process.on(name, () => {}); // the worker decides
readline.createInterface({ input: process.stdin }).on('line', obey).on('close', async () => {
  lines.close();
  const ends = [...browsers.values()].map((browser) => {
    browser.dead = true;
    browser.said = 'ostler: the worker died';
    for (const socket of browser.sockets) tell(socket, browser.said);
    return browser.server.kill().catch(() => {});
  });
  await Promise.all(ends);
  process.exit(0);
});
say({ event: 'up', version: require(process.argv[2] + '/package.json').version });
