// A worker that speaks WebSocket on a Unix socket and takes connections that are lent, without a browser: `node lent_worker.js LINE.JS SOCKET`.
// It echoes messages, each written as Playwright's server writes them. Of texts it does "close CODE WORDS", "send COUNT SIZE" and "hang".

'use strict';

const crypto = require('node:crypto');
const http = require('node:http');

const { Lines } = require(process.argv[2]);
const lines = new Lines();

function frame(opcode, payload) {
  const size = payload.length;
  const head = Buffer.alloc(size < 126 ? 2 : size < 65536 ? 4 : 10);
  head[0] = 0x80 | opcode;
  head[1] = size < 126 ? size : size < 65536 ? 126 : 127;
  if (head[1] === 126) head.writeUInt16BE(size, 2);
  if (head[1] === 127) head.writeBigUInt64BE(BigInt(size), 2);
  return [head, payload];
}

function send(socket, opcode, payload) {
  const [head, rest] = frame(opcode, payload);
  socket.cork();
  socket.write(head);
  socket.write(rest);
  socket.uncork();
}

function heard(socket, opcode, payload) {
  const text = opcode === 1 ? payload.toString() : '';
  if (opcode === 8) {
    socket.write(Buffer.concat(frame(8, payload)));
    socket.end();
  } else if (opcode === 9) send(socket, 10, payload);
  else if (opcode === 10) return;
  else if (text.startsWith('close ')) {
    const [, code, words] = /^close (\d+) (.*)$/.exec(text);
    const reason = Buffer.concat([Buffer.from([code >> 8, code & 255]), Buffer.from(words)]);
    socket.write(Buffer.concat(frame(8, reason)));
  } else if (text.startsWith('send ')) {
    const [count, size] = text.split(' ').slice(1).map(Number);
    for (let i = 0; i < count; i += 1) send(socket, 2, Buffer.alloc(size, i));
  } else if (text === 'hang') for (;;);
  else send(socket, opcode, payload);
}

const server = http.createServer();
const emit = server.emit;
server.emit = function (event, first, ...rest) {
  return emit.call(this, event, event === 'connection' ? lines.wrap(first) : first, ...rest);
};
server.on('upgrade', (request, socket, head) => {
  lines.upgraded(request.headers['x-ostler-session'], socket, head);
  const accept = crypto.createHash('sha1').update(request.headers['sec-websocket-key'] + '258EAFA5-E914-47DA-95CA-C5AB0DC85B11').digest('base64');
  socket.write(`HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: ${accept}\r\n\r\n`);
  let pieces = [head];
  let held = head.length;
  let wanted = 2;
  socket.on('data', (chunk) => {
    pieces.push(chunk);
    held += chunk.length;
    if (held < wanted) return;
    let data = Buffer.concat(pieces);
    for (;;) {
      const short = data.length > 1 ? data[1] & 127 : 0;
      const start = 2 + (short === 126 ? 2 : short === 127 ? 8 : 0) + 4;
      wanted = start;
      if (data.length < start) break;
      const size = short === 126 ? data.readUInt16BE(2) : short === 127 ? Number(data.readBigUInt64BE(2)) : short;
      wanted = start + size;
      if (data.length < wanted) break;
      const payload = Buffer.from(data.subarray(start, wanted));
      for (let i = 0; i < size; i += 1) payload[i] ^= data[start - 4 + (i & 3)];
      heard(socket, data[0] & 15, payload);
      data = data.subarray(wanted);
    }
    pieces = [data];
    held = data.length;
  });
  socket.on('error', () => {});
  socket.on('end', () => socket.end());
});
server.listen(process.argv[3], () => process.stdout.write('up\n'));
process.stdin.on('data', () => {}).on('end', () => process.exit(0));
