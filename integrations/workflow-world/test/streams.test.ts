import type { ServerResponse } from 'node:http';

import { describe, expect, onTestFinished, test } from 'vitest';

import { createWorld, type HoldfastWorld } from '../src/index.js';
import { frame, refuse, serving, type Double } from './double.js';

function worldOf(double: Double): HoldfastWorld {
  const world = createWorld({ serverUrl: double.url, retrySeconds: 5 });
  onTestFinished(() => world.close());
  return world;
}

async function textsOf(stream: ReadableStream<Uint8Array>): Promise<string[]> {
  const texts: string[] = [];
  const reader = stream.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) {
      return texts;
    }
    texts.push(Buffer.from(value).toString());
  }
}

const starts = (double: Double) => double.calls.map(({ path }) => new URL(path, double.url).searchParams.get('start'));

describe('reading', () => {
  test('chunks come as they were written, until the close', async () => {
    const large = 'x'.repeat(300_000);
    const body = Buffer.concat([frame(0, 'a'), frame(1), frame(0, ''), frame(0, large), frame(2)]);
    const double = await serving((_, response) => {
      for (let at = 0; at < 20; at++) {
        response.write(body.subarray(at, at + 1)); // heads that come in parts
      }
      response.end(body.subarray(20));
    });
    expect(await textsOf(await worldOf(double).streams.get('wrun_1', 'a/b'))).toEqual(['a', '', large]);
    expect(double.calls.map(({ path }) => path)).toEqual(['/v1/streams/wrun_1/a%2Fb?start=0']);
  });

  test('a connection that breaks goes on behind the last chunk', async () => {
    const bodies = [
      (response: ServerResponse) => {
        response.setHeader('x-holdfast-start', '7');
        response.write(Buffer.concat([frame(0, 'h'), frame(0, 'i').subarray(0, 3)]), () => response.destroy());
      },
      (response: ServerResponse) => response.end(frame(0, 'i')), // an end without a close
      (response: ServerResponse) => response.destroy(),
      (response: ServerResponse) => response.end(Buffer.concat([frame(0, 'j'), frame(2)])),
    ];
    const double = await serving((_, response) => {
      bodies.shift()!(response);
    });
    expect(await textsOf(await worldOf(double).streams.get('wrun_1', 's', -3))).toEqual(['h', 'i', 'j']);
    expect(starts(double)).toEqual(['-3', '8', '9', '9']);
  });

  test('an error ends the stream', async () => {
    const error = JSON.stringify({ error: { name: 'WorkflowWorldError', message: 'gone', status: 410 } });
    const double = await serving((_, response) => void response.end(Buffer.concat([frame(0, 'a'), frame(3, error)])));
    await expect(textsOf(await worldOf(double).streams.get('wrun_1', 's'))).rejects.toMatchObject({ message: 'gone', status: 410 });
  });

  test('a refusal is one of the call', async () => {
    const double = await serving((_, response) => refuse(response, 400, { name: 'WorkflowWorldError', message: 'start' }));
    await expect(worldOf(double).streams.get('wrun_1', 's')).rejects.toMatchObject({ status: 400 });
  });

  test('a reader that is cancelled lets go of its connection, and of no other', async () => {
    const double = await serving((_, response) => void response.write(frame(0, 'a')));
    const world = worldOf(double);
    const [one, two] = await Promise.all([world.streams.get('r', 's'), world.streams.get('r', 's')]);
    expect(double.sockets.size).toBe(2);
    const reader = one.getReader();
    await reader.read();
    const pending = reader.read();
    await reader.cancel();
    expect(await pending).toEqual({ done: true, value: undefined });
    await expect.poll(() => double.sockets.size).toBe(1);
    await two.cancel();
    await expect.poll(() => double.sockets.size).toBe(0);
  });

  test('closing the World ends its readers', async () => {
    const double = await serving((_, response) => void response.write(frame(0, 'a')));
    const world = worldOf(double);
    const texts = textsOf(await world.streams.get('r', 's')).catch((reason: unknown) => reason);
    await world.close();
    expect(await texts).toMatchObject({ message: 'the World is closed' });
  });

  test('cores of 4.x know the name only', async () => {
    const double = await serving((_, response) => void response.end(frame(2)));
    const world = worldOf(double);
    const ulid = '01KD0000000000000000000000';
    await textsOf(await world.readFromStream(`strm_${ulid}_user_bmFtZQ`, 2));
    await textsOf(await world.readFromStream(`strm_${ulid}`));
    expect(double.calls.map(({ path }) => path)).toEqual([
      `/v1/streams/wrun_${ulid}/strm_${ulid}_user_bmFtZQ?start=2`,
      `/v1/streams/-/strm_${ulid}?start=0`,
    ]);
  });
});

describe('writing', () => {
  test('what is written while a request is under way goes with the next one, in order', async () => {
    const held: ServerResponse[] = [];
    const double = await serving((_, response) => void held.push(response));
    const { streams } = worldOf(double);
    const writes = [
      streams.write('r', 's', 'a'),
      streams.write('r', 's', new Uint8Array([98])),
      streams.writeMulti('r', 's', ['c', 'd']),
      streams.close('r', 's'),
      streams.write('r', 's', 'e'),
    ];
    for (let answered = 0; answered < 4; answered++) {
      await expect.poll(() => held.length).toBe(answered + 1);
      held[answered]!.end('{}');
    }
    await Promise.all(writes);
    expect(double.calls.map(({ method, fields }) => [method, fields.chunks])).toEqual([
      ['streams.write', ['a']],
      ['streams.write', [new Uint8Array([98]), 'c', 'd']],
      ['streams.close', undefined],
      ['streams.write', ['e']],
    ]);
  });

  test('many and large chunks are split', async () => {
    const double = await serving(() => ({}));
    const { streams } = worldOf(double);
    await streams.writeMulti('r', 's', Array.from({ length: 2001 }, () => 'a'));
    await streams.writeMulti('r', 't', ['a', 'x'.repeat(2 << 20), 'b']);
    expect(double.calls.map(({ fields }) => (fields.chunks as unknown[]).length)).toEqual([1000, 1000, 1, 1, 1, 1]);
  });

  test('a refused write is the error of its callers, and of no others', async () => {
    const double = await serving(({ fields }, response) =>
      fields.name === 'closed' ? refuse(response, 409, { name: 'EntityConflictError', message: 'closed' }) : {},
    );
    const { streams } = worldOf(double);
    const results = await Promise.allSettled([
      streams.write('r', 'closed', 'a'),
      streams.write('r', 'open', 'a'),
      streams.write('r', 'closed', 'b'),
    ]);
    expect(results.map(({ status }) => status)).toEqual(['rejected', 'fulfilled', 'rejected']);
  });

  test('cores of 4.x give the name first', async () => {
    const double = await serving(() => ({ names: [] }));
    const world = worldOf(double);
    await world.writeToStream('n', Promise.resolve('r'), 'a');
    await world.writeToStreamMulti('n', 'r', ['b', 'c']);
    await world.closeStream('n', 'r');
    await world.listStreamsByRunId('r');
    await world.getStreamChunks('n', 'r', { limit: 5 });
    await world.getStreamInfo('n', 'r');
    expect(double.calls.map(({ method, fields: { operationId: _, ...fields } }) => [method, fields])).toEqual([
      ['streams.write', { runId: 'r', name: 'n', chunks: ['a'] }],
      ['streams.write', { runId: 'r', name: 'n', chunks: ['b', 'c'] }],
      ['streams.close', { runId: 'r', name: 'n' }],
      ['streams.list', { runId: 'r' }],
      ['streams.getChunks', { runId: 'r', name: 'n', limit: 5 }],
      ['streams.getInfo', { runId: 'r', name: 'n' }],
    ]);
  });
});
