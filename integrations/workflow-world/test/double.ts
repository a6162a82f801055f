/** A server that answers as a test wants. What the real one does is in `real.test.ts`, and in the conformance suite. */

import * as http from 'node:http';
import type { AddressInfo, Socket } from 'node:net';

import { onTestFinished } from 'vitest';

import { fromJson, toJson } from '../src/coding.js';

export interface Call {
  readonly method: string;
  readonly path: string;
  readonly token: string | undefined;
  readonly fields: Record<string, unknown>;
}

type Reply = (call: Call, response: http.ServerResponse) => unknown;

export class Double {
  readonly calls: Call[] = [];
  readonly sockets = new Set<Socket>();
  #server: http.Server | undefined;
  #port = 0;

  constructor(readonly reply: Reply) {}

  get url(): string {
    return `http://127.0.0.1:${this.#port}`;
  }

  async start(): Promise<this> {
    const server = http.createServer((request, response) => void this.#answer(request, response));
    server.on('connection', (socket) => {
      this.sockets.add(socket);
      socket.on('close', () => this.sockets.delete(socket));
    });
    await new Promise<void>((resolve) => server.listen(this.#port, '127.0.0.1', resolve));
    this.#port = (server.address() as AddressInfo).port;
    this.#server = server;
    return this;
  }

  async stop(): Promise<void> {
    const server = this.#server;
    this.#server = undefined;
    this.sockets.forEach((socket) => socket.destroy());
    await new Promise<void>((resolve) => (server === undefined ? resolve() : server.close(() => resolve())));
  }

  async #answer(request: http.IncomingMessage, response: http.ServerResponse): Promise<void> {
    const parts: Buffer[] = [];
    for await (const part of request) {
      parts.push(part as Buffer);
    }
    const text = Buffer.concat(parts).toString();
    const call: Call = {
      method: (request.url ?? '').replace(/^\/v1\//, ''),
      path: request.url ?? '',
      token: request.headers.authorization?.replace('Bearer ', ''),
      fields: text === '' ? {} : (fromJson(text) as Record<string, unknown>),
    };
    this.calls.push(call);
    const value = this.reply(call, response);
    if (value !== undefined && value !== response) {
      response.end(toJson(value));
    }
  }
}

/** Start a double for this test. */
export async function serving(reply: Reply): Promise<Double> {
  const double = await new Double(reply).start();
  onTestFinished(() => double.stop());
  return double;
}

export function refuse(response: http.ServerResponse, status: number, error: object): http.ServerResponse {
  response.statusCode = status;
  return response.end(JSON.stringify({ error: { status, ...error } }));
}

export function frame(kind: number, content: string | Buffer = ''): Buffer {
  const bytes = Buffer.from(content);
  const head = Buffer.alloc(5);
  head.writeUInt8(kind, 0);
  head.writeUInt32BE(bytes.length, 1);
  return Buffer.concat([head, bytes]);
}
