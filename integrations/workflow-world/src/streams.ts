/** Streams: chunks are written in order and in groups, and read live over connections that may break. */

import type { IncomingMessage } from 'node:http';
import { setTimeout as pause } from 'node:timers/promises';

import { fromJson } from './coding.js';
import type { Connection } from './connection.js';
import { errorOf, unreachable, WorldError } from './errors.js';

type Chunk = string | Uint8Array;

const MOST_CHUNKS = 1000;
const MOST_BYTES = 1 << 20;
const HEAD = 5; // of a frame: its kind, and its length in four bytes
const CHUNK = 0;
const CLOSED = 2;
const FAILED = 3;
const FIRST_PAUSE_MS = 50;
const LONGEST_PAUSE_MS = 5_000;

/** A page of the chunks that are there. */
export interface Chunks {
  data: { index: number; data: Uint8Array }[];
  cursor: string | null;
  hasMore: boolean;
  /** The stream is closed. */
  done: boolean;
}

export interface StreamInfo {
  /** The index of the last chunk; -1 if there is none. */
  tailIndex: number;
  done: boolean;
}

interface PageOptions {
  limit?: number;
  cursor?: string;
}

export interface Streams {
  streams: {
    write(runId: string, name: string, chunk: Chunk): Promise<void>;
    writeMulti(runId: string, name: string, chunks: Chunk[]): Promise<void>;
    close(runId: string, name: string): Promise<void>;
    /** Read live, from a chunk on; below zero, that many before the end. */
    get(runId: string, name: string, startIndex?: number): Promise<ReadableStream<Uint8Array>>;
    list(runId: string): Promise<string[]>;
    getChunks(runId: string, name: string, options?: PageOptions): Promise<Chunks>;
    getInfo(runId: string, name: string): Promise<StreamInfo>;
  };
  /** From here on: as cores of 4.x call them. They read by the name alone. */
  writeToStream(name: string, runId: string | Promise<string>, chunk: Chunk): Promise<void>;
  writeToStreamMulti(name: string, runId: string | Promise<string>, chunks: Chunk[]): Promise<void>;
  closeStream(name: string, runId: string | Promise<string>): Promise<void>;
  readFromStream(name: string, startIndex?: number): Promise<ReadableStream<Uint8Array>>;
  listStreamsByRunId(runId: string): Promise<string[]>;
  getStreamChunks(name: string, runId: string, options?: PageOptions): Promise<Chunks>;
  getStreamInfo(name: string, runId: string): Promise<StreamInfo>;
}

export function createStreams(use: () => Connection): Streams {
  const writers = new Map<string, Writer>();
  const writer = (runId: string, name: string): Writer => {
    const key = `${runId}/${name}`;
    const found = writers.get(key) ?? new Writer(use(), runId, name, () => writers.delete(key));
    writers.set(key, found);
    return found;
  };
  const streams: Streams['streams'] = {
    write: async (runId, name, chunk) => writer(runId, name).write([chunk]),
    writeMulti: async (runId, name, chunks) => writer(runId, name).write(chunks),
    close: async (runId, name) => writer(runId, name).close(),
    get: async (runId, name, startIndex = 0) => readable(use(), runId, name, startIndex),
    list: async (runId) => (await use().call<{ names: string[] }>('streams.list', { runId })).names,
    getChunks: async (runId, name, options) => use().call('streams.getChunks', { ...options, runId, name }),
    getInfo: async (runId, name) => use().call('streams.getInfo', { runId, name }),
  };
  return {
    streams,
    writeToStream: async (name, runId, chunk) => streams.write(await runId, name, chunk),
    writeToStreamMulti: async (name, runId, chunks) => streams.writeMulti(await runId, name, chunks),
    closeStream: async (name, runId) => streams.close(await runId, name),
    readFromStream: (name, startIndex) => streams.get(runOf(name), name, startIndex),
    listStreamsByRunId: (runId) => streams.list(runId),
    getStreamChunks: (name, runId, options) => streams.getChunks(runId, name, options),
    getStreamInfo: (name, runId) => streams.getInfo(runId, name),
  };
}

/** Return the run of a stream by its name; `-` if only the server can find it. */
function runOf(name: string): string {
  const ulid = /^strm_([0-9A-Z]{26})_user/.exec(name)?.[1];
  return ulid === undefined ? '-' : `wrun_${ulid}`;
}

interface Waiting {
  readonly chunks: Chunk[];
  readonly closes: boolean;
  readonly resolve: () => void;
  readonly reject: (error: unknown) => void;
}

/** Writes of this process to one stream: one request at a time, and what comes meanwhile goes with the next one. */
class Writer {
  #waiting: Waiting[] = [];
  #isBusy = false;

  constructor(
    readonly connection: Connection,
    readonly runId: string,
    readonly name: string,
    readonly onIdle: () => void,
  ) {}

  write(chunks: Chunk[]): Promise<void> {
    return chunks.length === 0 ? Promise.resolve() : this.#enqueue(chunks, false);
  }

  /** Close the stream behind all that was written before. */
  close(): Promise<void> {
    return this.#enqueue([], true);
  }

  #enqueue(chunks: Chunk[], closes: boolean): Promise<void> {
    const done = new Promise<void>((resolve, reject) => this.#waiting.push({ chunks, closes, resolve, reject }));
    if (!this.#isBusy) {
      this.#isBusy = true;
      void this.#work();
    }
    return done;
  }

  async #work(): Promise<void> {
    while (this.#waiting.length > 0) {
      const group = this.#nextGroup();
      try {
        await this.#send(group);
        for (const { resolve } of group) {
          resolve();
        }
      } catch (error) {
        for (const { reject } of group) {
          reject(error);
        }
      }
    }
    this.#isBusy = false;
    this.onIdle();
  }

  #nextGroup(): Waiting[] {
    const end = this.#waiting.findIndex(({ closes }) => closes);
    const count = end === 0 ? 1 : end < 0 ? this.#waiting.length : end;
    return this.#waiting.splice(0, count);
  }

  async #send(group: Waiting[]): Promise<void> {
    const { runId, name } = this;
    if (group[0]!.closes) {
      await this.connection.write('streams.close', { runId, name });
      return;
    }
    for (const chunks of parts(group.flatMap(({ chunks }) => chunks))) {
      await this.connection.write('streams.write', { runId, name, chunks });
    }
  }
}

/** Split chunks into lists that are small enough for one request each. */
function* parts(chunks: Chunk[]): Generator<Chunk[]> {
  let part: Chunk[] = [];
  let bytes = 0;
  for (const chunk of chunks) {
    const size = typeof chunk === 'string' ? Buffer.byteLength(chunk) : chunk.byteLength;
    if (part.length > 0 && (part.length >= MOST_CHUNKS || bytes + size > MOST_BYTES)) {
      yield part;
      part = [];
      bytes = 0;
    }
    part.push(chunk);
    bytes += size;
  }
  yield part;
}

/** Return the chunks of a stream from `start` on, as they come. */
async function readable(
  connection: Connection,
  runId: string,
  name: string,
  start: number,
): Promise<ReadableStream<Uint8Array>> {
  const cancelled = new AbortController();
  const reader = new Reader(connection, `/v1/streams/${encodeURIComponent(runId)}/${encodeURIComponent(name)}`, start, cancelled.signal);
  const forget = connection.onClose(() => cancelled.abort(unreachable('the World is closed')));
  await reader.open();
  const chunks = reader.chunks();
  return new ReadableStream<Uint8Array>({
    async pull(controller) {
      try {
        const { done, value } = await chunks.next();
        if (done) {
          forget();
          controller.close();
        } else {
          controller.enqueue(value);
        }
      } catch (error) {
        forget();
        throw error;
      }
    },
    cancel(reason) {
      forget();
      cancelled.abort(reason ?? unreachable('the reader was cancelled'));
    },
  });
}

class Reader {
  #response: IncomingMessage | undefined;

  constructor(
    readonly connection: Connection,
    readonly path: string,
    /** The index of the next chunk; below zero, counted from the end, until the server has answered. */
    public next: number,
    readonly signal: AbortSignal,
  ) {}

  async open(): Promise<void> {
    this.#response = await this.connection.open(`${this.path}?start=${this.next}`, this.signal);
    const first = Number(this.#response.headers['x-holdfast-start']);
    if (this.next < 0 && Number.isInteger(first)) {
      this.next = first;
    }
  }

  /** Yield chunks until the stream is closed. A connection that breaks is opened again behind the last chunk. */
  async *chunks(): AsyncGenerator<Uint8Array, void> {
    for (let pauseMs = FIRST_PAUSE_MS; ; pauseMs = Math.min(pauseMs * 2, LONGEST_PAUSE_MS)) {
      if (this.#response === undefined) {
        await this.open();
      }
      try {
        for await (const { kind, content } of frames(this.#response!)) {
          pauseMs = FIRST_PAUSE_MS;
          if (kind === CLOSED) {
            return;
          }
          if (kind === FAILED) {
            throw errorOf(500, fromJson(content.toString()));
          }
          if (kind === CHUNK) {
            this.next += 1;
            yield new Uint8Array(content); // a copy: the content is a view of what was received
          }
        }
      } catch (error) {
        this.signal.throwIfAborted();
        if (error instanceof WorldError) {
          throw error;
        }
      }
      this.#response = undefined;
      this.signal.throwIfAborted();
      await pause(pauseMs, undefined, { signal: this.signal });
    }
  }
}

interface Frame {
  readonly kind: number;
  readonly content: Buffer;
}

/** Yield the whole frames of a response. Ends where it is cut off. */
async function* frames(response: IncomingMessage): AsyncGenerator<Frame> {
  let rest: Buffer[] = [];
  let size = 0;
  let needed = HEAD;
  for await (const part of response) {
    rest.push(part as Buffer);
    size += (part as Buffer).length;
    if (size < needed) {
      continue; // joined once per frame: a large chunk comes in many parts
    }
    let buffer = Buffer.concat(rest);
    needed = HEAD;
    while (buffer.length >= HEAD) {
      const end = HEAD + buffer.readUInt32BE(1);
      if (buffer.length < end) {
        needed = end;
        break;
      }
      yield { kind: buffer[0]!, content: buffer.subarray(HEAD, end) };
      buffer = buffer.subarray(end);
    }
    rest = [buffer];
    size = buffer.length;
  }
}
