// For benchmarks/sessions.py: the grid's own serve.js, whose browsers can be reached on TCP as well as on their Unix sockets, without a process between.
// So "direct" is what a client has where Playwright's own server listens on TCP, and it is the very browser that the relay leads to.

'use strict';

const fs = require('node:fs');
const http = require('node:http');
const net = require('node:net');
const path = require('node:path');

const listen = http.Server.prototype.listen;
http.Server.prototype.listen = function (where, ...rest) {
  const also = net.createServer({ noDelay: true }, (socket) => this.emit('connection', socket));
  also.listen(0, '127.0.0.1', () => fs.writeFileSync(`${where}.port`, String(also.address().port)));
  return listen.call(this, where, ...rest);
};

require(path.join(__dirname, '..', 'src', 'ostler', 'apps', 'browsers', 'serve.js'));
