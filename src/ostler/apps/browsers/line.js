// One client's connection, as Playwright's server sees it. It comes from the relay on a Unix socket (the way). While the client talks much, the relay
// lends the client's own socket: then bytes are read and written there, without a hop. sessions/lending.py has the other side, and the messages.
// A frame is always written by one call, so between two of them the relay can put a close frame of its own.

'use strict';

const { Duplex } = require('node:stream');

const LARGE = 65536; // bytes that may not fit into the system's buffer at once
const CLOSE = 8;
const LONGEST_CONTROL = 125;

// Follows the headers of frames without holding what they carry, as frames.Track does.
class Track {
  constructor() {
    this.left = 0; // bytes of the present frame that are still to come
    this.isData = false; // … and whether it is more than a ping, a pong or a close
    this.head = Buffer.alloc(0); // a header that is not whole
    this.closing = null; // the bytes of a close frame that is not whole
    this.closed = null; // [code, reason]
  }

  // Whether it was more than pings, pongs and a close.
  feed(data) {
    let at = this.left;
    let counts = at > 0 && this.isData;
    if (this.closing) this.gather(data.subarray(0, at));
    if (at >= data.length) {
      this.left = at - data.length;
      return counts;
    }
    if (this.head.length) {
      data = Buffer.concat([this.head, data]);
      this.head = this.head.subarray(0, 0);
    }
    while (at < data.length) {
      const start = headed(data, at);
      if (start < 0) {
        this.left = 0;
        this.head = Buffer.from(data.subarray(at));
        return counts;
      }
      const length = sized(data, at);
      const opcode = data[at] & 15;
      this.isData = opcode < CLOSE;
      counts ||= this.isData;
      if (opcode === CLOSE && !this.closed && length <= LONGEST_CONTROL) {
        this.closing = { mask: data[at + 1] & 128 ? Buffer.from(data.subarray(start - 4, start)) : Buffer.alloc(4), held: Buffer.alloc(0), length };
        this.gather(data.subarray(start, start + length));
      }
      at = start + length;
    }
    this.left = at - data.length;
    return counts;
  }

  gather(piece) {
    const { mask, length } = this.closing;
    const held = this.closing.held = Buffer.concat([this.closing.held, piece]);
    if (held.length < length) return;
    this.closing = null;
    const plain = held.map((byte, i) => byte ^ mask[i % 4]);
    this.closed = length < 2 ? [1005, ''] : [plain.readUInt16BE(0), plain.toString('utf8', 2)];
  }
}

// Where what the frame carries begins; -1: its header is not whole.
function headed(data, at) {
  if (at + 2 > data.length) return -1;
  const short = data[at + 1] & 127;
  const start = at + 2 + (short === 126 ? 2 : short === 127 ? 8 : 0) + (data[at + 1] & 128 ? 4 : 0);
  return start > data.length ? -1 : start;
}

function sized(data, at) {
  const short = data[at + 1] & 127;
  if (short < 126) return short;
  return short === 126 ? data.readUInt16BE(at + 2) : Number(data.readBigUInt64BE(at + 2));
}

// A close frame with a reason: without it a client would only learn that something was closed.
function farewell(text) {
  const reason = Buffer.from(text).subarray(0, LONGEST_CONTROL - 2);
  return Buffer.concat([Buffer.from([0x88, reason.length + 2, 0x03, 0xf3]), reason]); // 1011
}

class Line extends Duplex {
  // `say` tells the relay; false: there is nobody to tell.
  constructor(way, say) {
    super();
    this.way = way;
    this.tell = say;
    this.session = null; // known with the upgrade
    this.loan = 0; // the number of the present one, or of the last
    this.client = null; // its own socket, while that is lent
    this.offered = null; // … and before all that went the other way is here
    this.held = null; // a write that waits for the relay's go
    this.holds = this.isReturning = this.isStuck = this.hasEnded = false;
    this.came = 0; // bytes on the way from the relay, since the upgrade
    this.went = -1; // … and to it; -1: the answer to the upgrade is not written yet
    way.on('data', (chunk) => {
      this.came += chunk.length;
      this.pass(chunk, way);
      this.arrived();
    });
    way.on('end', () => this.ended());
    way.on('error', () => {});
    way.on('close', () => {
      this.ended();
      this.destroy();
    });
  }

  // What a server expects of a socket.
  setTimeout() { return this; }
  setNoDelay() { return this; }
  setKeepAlive() { return this; }

  upgraded(session, head) {
    this.session = session;
    this.came = head.length;
  }

  say(verb, ...more) {
    this.tell([verb, this.session, this.loan, ...more]);
  }

  // ---- what is read

  pass(chunk, from) {
    if (!this.hasEnded && !this.destroyed && !this.push(chunk)) from.pause();
  }

  _read() {
    (this.client || this.way).resume();
  }

  ended() { // the relay has ended it, or has died
    if (this.hasEnded) return;
    this.hasEnded = true;
    const client = this.drop();
    if (client) leave(client, 'ostler: the relay died'); // one that lives has told the client already, and this is not looked at
    if (!this.destroyed) this.push(null);
  }

  // ---- what is written

  _write(chunk, _, done) { this.put([chunk], done); }
  _writev(chunks, done) { this.put(chunks.map(({ chunk }) => chunk), done); }

  put(chunks, done) {
    if (this.holds) {
      this.held = () => this.put(chunks, done);
      return;
    }
    if (this.client) {
      for (const chunk of chunks) if (this.written.feed(chunk)) this.active = performance.now();
      if (this.written.closed) this.give([]); // ends are the relay's business
    }
    const to = this.client || this.way;
    const size = chunks.reduce((sum, chunk) => sum + chunk.length, 0);
    if (to === this.way) this.count(chunks[0], size);
    else if (size > LARGE) this.stick();
    to.cork();
    const last = chunks.pop();
    for (const chunk of chunks) to.write(chunk);
    to.write(last, (error) => {
      if (to !== this.way) this.taken(error);
      done(to === this.way ? error : null); // of a client that has gone the relay speaks
    });
    to.uncork();
    if (to === this.client && to.writableLength) this.stick();
  }

  count(first, size) {
    const head = this.went < 0 ? first.indexOf('\r\n\r\n') : 0;
    if (this.session === null || head < 0) return;
    this.went = this.went < 0 ? size - head - 4 : this.went + size;
  }

  stick() {
    if (this.isStuck) return;
    this.isStuck = true;
    this.say('stuck');
  }

  taken(error) { // by the system, all of it
    if (this.isStuck) {
      this.isStuck = false;
      this.say('unstuck');
    }
    if (this.client && (error || this.isReturning)) this.give([]);
  }

  _final(done) {
    this.giveBack([]);
    this.way.end(done);
  }

  _destroy(error, done) {
    this.drop()?.destroy();
    this.way.destroy();
    done(error);
  }

  // ---- lent

  take(loan, bytes, client) {
    client.on('error', () => {});
    client.allowHalfOpen = true; // its end is not ours to answer
    this.loan = loan;
    if (this.client || this.offered || this.destroyed || this.hasEnded || this.writableEnded || this.went < 0) {
      client.destroy();
      this.say('no');
      return;
    }
    this.offered = { bytes, client };
    this.arrived();
  }

  arrived() {
    if (!this.offered || this.came < this.offered.bytes) return;
    const { client } = this.offered;
    this.offered = null;
    this.client = client;
    this.holds = true;
    this.heard = new Track();
    this.written = new Track();
    this.active = null; // when more than pings went by
    client.on('data', (chunk) => this.hear(chunk));
    client.on('end', () => this.giveBack([]));
    client.on('close', () => this.giveBack([]));
    this.way.resume(); // nothing comes there but its end
    this.say('took', this.went);
  }

  hear(chunk) {
    if (this.heard.feed(chunk)) this.active = performance.now();
    if (this.heard.closed) this.giveBack([chunk]);
    else this.pass(chunk, this.client);
  }

  go(loan) {
    if (loan === this.loan) this.release();
  }

  back(loan) {
    if (loan === this.loan) this.giveBack([]);
  }

  release() {
    const { held } = this;
    this.held = null;
    this.holds = false;
    if (held) held();
  }

  // Between two frames: where one is half written, after it. `chunks` were read, and not passed on yet.
  giveBack(chunks) {
    if (!this.client) return;
    if (this.client.writableLength && !this.client.destroyed) {
      this.isReturning = true;
      for (const chunk of chunks) this.pass(chunk, this.client);
    } else this.give(chunks);
  }

  // What is written from now on goes the other way, behind what is written already: nobody has to wait for it.
  give(chunks) {
    const { client } = this;
    client.removeAllListeners('data');
    for (let chunk; (chunk = client.read()) !== null;) {
      this.heard.feed(chunk);
      chunks.push(chunk);
    }
    const { left, head, closed } = this.heard;
    const rest = this.active === null ? -1 : Math.round(performance.now() - this.active);
    this.say('gave', { left, head: head.toString('hex'), closed, rest });
    this.drop().destroy(); // the relay has it open, too
    for (const chunk of chunks) this.pass(chunk, this.way);
  }

  // Without a word: there is nobody to tell, or it is told already. The socket, if there is one.
  drop() {
    const client = this.client || this.offered?.client;
    this.client = this.offered = null;
    this.isReturning = this.isStuck = false;
    this.release();
    return client;
  }
}

// Tell a client why, and let it go: what it still sends is not looked at, so that it reads the reason.
function leave(client, text) {
  client.removeAllListeners('data');
  client.resume();
  client.end(farewell(text));
  setTimeout(() => client.destroy(), 1000).unref();
}

// All lines of this process. Connections are lent on Node's own channel, for that alone can pass them.
class Lines {
  constructor() {
    this.isOpen = process.connected;
    this.bySession = new Map();
    process.on('disconnect', () => this.close());
    process.on('message', ([verb, session, loan, bytes], client) => {
      const line = this.bySession.get(session);
      if (verb !== 'take') line?.[verb === 'go' ? 'go' : 'back'](loan);
      else if (line) line.take(loan, bytes, client);
      else {
        client.destroy();
        this.say(['no', session, loan]);
      }
    });
  }

  say(message) {
    if (this.isOpen) process.send(message, () => {});
  }

  wrap(socket) {
    return this.isOpen ? new Line(socket, (message) => this.say(message)) : socket;
  }

  upgraded(session, line, head) {
    if (!(line instanceof Line)) return;
    line.upgraded(session, head);
    this.bySession.set(session, line);
    line.once('close', () => { if (this.bySession.get(session) === line) this.bySession.delete(session); });
  }

  // The worker dies, and nobody speaks for the relay any more: what is still said goes the ordinary way.
  close() {
    this.isOpen = false;
    for (const line of this.bySession.values()) line.drop()?.destroy();
  }
}

module.exports = { Lines, farewell };
