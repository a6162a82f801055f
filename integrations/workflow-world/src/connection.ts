/** The one connection to a server that all worlds of this process with the same settings share. */

import { randomBytes, randomUUID } from 'node:crypto';
import type { IncomingMessage } from 'node:http';
import { setTimeout as pause } from 'node:timers/promises';

import { startChild, type ChildServer } from './child.js';
import { fromJson, toJson } from './coding.js';
import type { ConnectionSettings } from './config.js';
import { errorOf, StartFailed, textOf, unreachable, WorldError } from './errors.js';
import { Sockets, reasonOf, textOf as bodyOf, type Answer, type Target } from './http.js';

const FIRST_PAUSE_MS = 50;
const LONGEST_PAUSE_MS = 5_000;
/** Servers say every 15 s that they are alive. */
const QUIET_MS = 45_000;

type Fields = Record<string, unknown>;

export class Connection {
  readonly #settings: ConnectionSettings;
  readonly #sockets = new Sockets();
  readonly #closed = new AbortController();
  readonly #onClose: () => void;
  readonly #childToken = randomBytes(32).toString('base64url');
  #users = 0;
  #child: Promise<ChildServer> | undefined;
  #restarts = 0;
  #restart: NodeJS.Timeout | undefined;
  /** The address that `start` has registered: a new child has to hear of it too. */
  #baseUrl: string | undefined;

  constructor(settings: ConnectionSettings, onClose: () => void) {
    this.#settings = settings;
    this.#onClose = onClose;
  }

  get baseUrl(): string | undefined {
    return this.#baseUrl;
  }

  acquire(): void {
    this.#users += 1;
  }

  /** Close the connection if nobody else uses it: end streams, and the child after its deliveries. */
  async release(): Promise<void> {
    this.#users -= 1;
    if (this.#users > 0 || this.#closed.signal.aborted) {
      return;
    }
    this.#onClose();
    this.#closed.abort(closed());
    const child = await this.#child?.catch(() => undefined);
    this.#sockets.close();
    await child?.stop();
  }

  /** Register the address of this program, from when on messages are delivered. */
  async start(baseUrl: string): Promise<void> {
    this.#baseUrl = baseUrl;
    await this.call('start', { baseUrl });
  }

  /** Do a write: repeated after a lost answer, it happens once. */
  write<T>(method: string, fields: Fields): Promise<T> {
    return this.call<T>(method, { ...fields, operationId: randomUUID() });
  }

  /** Call a method, and return its answer. Repeats it while the server does not answer; `signal` ends that. */
  async call<T>(method: string, fields: Fields): Promise<T> {
    const { signal, ...rest } = fields;
    const json = toJson(rest);
    const given = signal instanceof AbortSignal ? signal : undefined;
    return this.#insisting(given, async (target) => {
      const timeoutMs = this.#settings.timeoutSeconds * 1000;
      const answer = await this.#sockets.post(target, `/v1/${method}`, json, { timeoutMs, signal: given });
      return valueOf(answer, rest) as T;
    });
  }

  /** Return a response that goes on and on, once its headers are there. */
  open(path: string, signal: AbortSignal): Promise<IncomingMessage> {
    return this.#insisting(signal, async (target) => {
      const response = await this.#sockets.open(target, path, { timeoutMs: QUIET_MS, signal });
      if (response.statusCode !== 200) {
        throw errorOf(response.statusCode ?? 0, bodyAsJson(await bodyOf(response)));
      }
      return response;
    });
  }

  /** Call `listener` when the connection is closed. Returns what takes that back. */
  onClose(listener: () => void): () => void {
    this.#closed.signal.addEventListener('abort', listener);
    return () => this.#closed.signal.removeEventListener('abort', listener);
  }

  async #insisting<T>(signal: AbortSignal | undefined, attempt: (target: Target) => Promise<T>): Promise<T> {
    const deadline = Date.now() + this.#settings.retrySeconds * 1000;
    for (let pauseMs = FIRST_PAUSE_MS; ; pauseMs = Math.min(pauseMs * 2, LONGEST_PAUSE_MS)) {
      try {
        this.#closed.signal.throwIfAborted();
        signal?.throwIfAborted();
        return await attempt(await this.#target());
      } catch (error) {
        const ended = reasonOf(signal) ?? reasonOf(this.#closed.signal);
        if (ended !== undefined) {
          throw ended;
        }
        if (!mayPass(error)) {
          throw error;
        }
        if (Date.now() + pauseMs > deadline) {
          throw error instanceof WorldError ? error : unreachable(`the Holdfast server does not answer: ${textOf(error)}`, error);
        }
        // An abort during the pause is found at the next turn.
        await pause(pauseMs, undefined, signal && { signal }).catch(() => undefined);
      }
    }
  }

  async #target(): Promise<Target> {
    const { serverUrl, token } = this.#settings;
    if (serverUrl !== undefined) {
      return { url: serverUrl, token };
    }
    this.#child ??= this.#started();
    return { url: (await this.#child).url, token: this.#childToken };
  }

  /** Start a child, and another one when it ends: the messages of this program need somebody who delivers them. */
  async #started(): Promise<ChildServer> {
    const environment = { ...this.#settings.environment, HOLDFAST_WORLD_TOKEN: this.#childToken };
    let child: ChildServer | undefined;
    try {
      child = await startChild({ ...this.#settings, environment });
      if (this.#baseUrl !== undefined) {
        const timeoutMs = this.#settings.timeoutSeconds * 1000;
        const target = { url: child.url, token: this.#childToken };
        valueOf(await this.#sockets.post(target, '/v1/start', toJson({ baseUrl: this.#baseUrl }), { timeoutMs }), {});
        this.#restarts = 0;
      }
    } catch (error) {
      this.#child = undefined; // the next call tries again
      void child?.stop();
      this.#restartSoon();
      throw error;
    }
    void child.ended.then((how) => this.#ended(how));
    return child;
  }

  #ended(how: string): void {
    this.#child = undefined;
    if (this.#closed.signal.aborted) {
      return;
    }
    process.stderr.write(`holdfast: the World's server ended with ${how}; a new one is started\n`);
    this.#restartSoon();
  }

  /** See that messages are delivered, also while nobody calls: after 1 s, doubling to 30 s. */
  #restartSoon(): void {
    if (this.#baseUrl === undefined || this.#restart !== undefined) {
      return;
    }
    const pauseMs = Math.min(1000 * 2 ** this.#restarts++, 30_000);
    this.#restart = setTimeout(() => {
      this.#restart = undefined;
      if (!this.#closed.signal.aborted) {
        this.#child ??= this.#started();
        this.#child.catch(() => undefined);
      }
    }, pauseMs).unref();
  }
}

/** Return the value of an answer. Throws the error of one that is not 2xx. */
function valueOf(answer: Answer, subject: Fields): unknown {
  const body = bodyAsJson(answer.text);
  if (answer.status < 200 || answer.status > 299) {
    throw errorOf(answer.status, body, subject);
  }
  if (body === undefined) {
    throw unreachable(`the Holdfast server answered what is no JSON: ${answer.text.slice(0, 200)}`);
  }
  return body;
}

function bodyAsJson(text: string): unknown {
  try {
    return fromJson(text);
  } catch {
    return undefined;
  }
}

/** Whether the same call may succeed a little later. */
function mayPass(error: unknown): boolean {
  if (error instanceof WorldError) {
    return !(error instanceof StartFailed) && [502, 503, 504].includes(error.status);
  }
  return !(error instanceof TypeError || error instanceof RangeError); // mistakes in the request itself
}

function closed(): WorldError {
  return new WorldError('WorkflowWorldError', 'the World is closed', { status: 503 });
}

const CONNECTIONS = Symbol.for('@holdfast/workflow-world//connections');

/** Return the connection of these settings: one per process, also where a bundler has made copies of this module. */
export function connectionOf(settings: ConnectionSettings): Connection {
  const home = globalThis as { [CONNECTIONS]?: Map<string, Connection> };
  const connections = (home[CONNECTIONS] ??= new Map<string, Connection>());
  const key = JSON.stringify(settings);
  const found = connections.get(key);
  if (found !== undefined) {
    return found;
  }
  const made = new Connection(settings, () => connections.delete(key));
  connections.set(key, made);
  return made;
}

