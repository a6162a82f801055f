/** HTTP requests by `node:http`: `fetch` is replaced by some frameworks, and limits how long an answer may take. */

import * as http from 'node:http';
import * as https from 'node:https';

export interface Target {
  readonly url: string;
  readonly token: string | undefined;
}

export interface Answer {
  readonly status: number;
  readonly text: string;
}

interface Options {
  readonly timeoutMs: number;
  readonly signal?: AbortSignal;
}

/** Sockets that are kept open between calls. Those without a call do not keep the process alive. */
export class Sockets {
  readonly #http = new http.Agent({ keepAlive: true });
  readonly #https = new https.Agent({ keepAlive: true });

  /** Post a JSON text, and return the whole answer. Rejects if there is none in time. */
  async post(target: Target, path: string, json: string, options: Options): Promise<Answer> {
    const limit = AbortSignal.timeout(options.timeoutMs);
    const signal = options.signal === undefined ? limit : AbortSignal.any([limit, options.signal]);
    const body = Buffer.from(json);
    const response = await this.#send(target, 'POST', path, { 'content-type': 'application/json' }, signal, body);
    return { status: response.statusCode ?? 0, text: await textOf(response, signal) };
  }

  /** Return a response as soon as its headers are there. It is cut off if nothing comes for `timeoutMs`. */
  async open(target: Target, path: string, options: Options): Promise<http.IncomingMessage> {
    const waiting = new AbortController();
    const timer = setTimeout(() => waiting.abort(new Error('no answer in time')), options.timeoutMs);
    const signals = [waiting.signal, ...(options.signal === undefined ? [] : [options.signal])];
    try {
      const response = await this.#send(target, 'GET', path, {}, AbortSignal.any(signals));
      response.setTimeout(options.timeoutMs, () => response.destroy(new Error('nothing came in time')));
      return response;
    } finally {
      clearTimeout(timer);
    }
  }

  close(): void {
    this.#http.destroy();
    this.#https.destroy();
  }

  #send(
    target: Target,
    method: string,
    path: string,
    headers: Record<string, string>,
    signal: AbortSignal,
    body?: Buffer,
  ): Promise<http.IncomingMessage> {
    const url = new URL(target.url + path);
    const isSecure = url.protocol === 'https:';
    return new Promise((resolve, reject) => {
      const request = (isSecure ? https : http).request(url, {
        method,
        // A response that goes on and on has a socket of its own: its timeout must not stay with the next call.
        agent: body === undefined ? false : isSecure ? this.#https : this.#http,
        headers: {
          ...headers,
          ...(target.token !== undefined && { authorization: `Bearer ${target.token}` }),
          ...(body !== undefined && { 'content-length': body.length }),
        },
        signal,
      });
      // The error of an abort says nothing of its reason.
      request.on('error', (error) => {
        reject(reasonOf(signal) ?? error);
      });
      request.on('response', resolve);
      request.end(body);
    });
  }
}

/** Return why a signal was aborted, as an error; undefined if it was not. */
export function reasonOf(signal: AbortSignal | undefined): Error | undefined {
  if (!signal?.aborted) {
    return undefined;
  }
  return signal.reason instanceof Error ? signal.reason : new Error(String(signal.reason));
}

/** Return the body of a response. Rejects if it is cut off. */
export async function textOf(response: http.IncomingMessage, signal?: AbortSignal): Promise<string> {
  const parts: Buffer[] = [];
  try {
    for await (const part of response) {
      parts.push(part as Buffer);
    }
  } catch (error) {
    throw reasonOf(signal) ?? error;
  }
  return Buffer.concat(parts).toString();
}
