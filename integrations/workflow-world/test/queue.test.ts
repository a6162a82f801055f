import { describe, expect, onTestFinished, test } from 'vitest';

import { toJson } from '../src/coding.js';
import { createWorld } from '../src/index.js';
import { serving } from './double.js';

const PREFIX = '__wkf_workflow_';
const HEADERS = { 'x-vqs-queue-name': `${PREFIX}w`, 'x-vqs-message-id': 'msg_1', 'x-vqs-message-attempt': '2' };

type Result = undefined | { timeoutSeconds: number };

function delivered(body: string, headers: Record<string, string>, answer: (message: unknown, meta: object) => Result) {
  const world = createWorld({ serverUrl: 'http://127.0.0.1:1' });
  // Cores call it without its object.
  // eslint-disable-next-line @typescript-eslint/unbound-method
  const { createQueueHandler } = world;
  const handle = createQueueHandler(PREFIX, (message, meta) => Promise.resolve(answer(message, meta)));
  return handle(new Request('http://localhost/flow', { method: 'POST', headers, body }));
}

describe('deliveries', () => {
  test('a handler gets the message and where it comes from', async () => {
    const message = { runId: 'wrun_1', requestedAt: new Date(5), runInput: { input: new Uint8Array([1, 2]) } };
    const response = await delivered(toJson(message), HEADERS, (got, meta) => {
      expect(got).toEqual(message);
      expect(meta).toEqual({ queueName: `${PREFIX}w`, messageId: 'msg_1', attempt: 2 });
      return undefined;
    });
    expect([response.status, await response.json()]).toEqual([200, {}]);
  });

  test.each([0, 0.5, 3600])('redelivery in %d s', async (timeoutSeconds) => {
    const response = await delivered('{}', HEADERS, () => ({ timeoutSeconds }));
    expect([response.status, await response.json()]).toEqual([200, { timeoutSeconds }]);
  });

  test('what a handler throws is tried again', async () => {
    const response = await delivered('{}', HEADERS, () => {
      throw new Error('broken');
    });
    expect([response.status, await response.json()]).toEqual([500, { error: { message: 'broken' } }]);
  });

  test.each([
    ['no JSON', '<html>', HEADERS],
    ['no id', '{}', { ...HEADERS, 'x-vqs-message-id': undefined }],
    ['no number of the attempt', '{}', { ...HEADERS, 'x-vqs-message-attempt': 'x' }],
    ['another queue', '{}', { ...HEADERS, 'x-vqs-queue-name': '__wkf_step_s' }],
  ])('refused: %s', async (_, body, headers) => {
    const given = Object.fromEntries(Object.entries(headers).filter(([, value]) => value !== undefined));
    const response = await delivered(body, given as Record<string, string>, () => {
      throw new Error('called');
    });
    expect(response.status).toBe(400);
  });
});

describe('sending', () => {
  test('a message has the address of the program, once it takes deliveries', async () => {
    const double = await serving(({ method }) => (method === 'queue' ? { messageId: 'msg_1' } : {}));
    const world = createWorld({ serverUrl: double.url, baseUrl: 'http://localhost:4000/' });
    onTestFinished(() => world.close());
    const queueName = `${PREFIX}w` as Parameters<typeof world.queue>[0];
    expect(await world.queue(queueName, { runId: 'r' })).toEqual({ messageId: 'msg_1' });
    await world.start();
    const options = { idempotencyKey: 'k', delaySeconds: 90_000, headers: { a: 'b' }, deploymentId: 'd', specVersion: 5 };
    await world.queue(queueName, { runId: 'r' }, options);
    const sent = double.calls.map(({ method, fields: { operationId, ...fields } }) => [method, typeof operationId, fields]);
    expect(sent).toEqual([
      ['queue', 'string', { queueName, message: { runId: 'r' } }],
      ['start', 'undefined', { baseUrl: 'http://localhost:4000' }],
      [
        'queue',
        'string',
        {
          queueName,
          message: { runId: 'r' },
          idempotencyKey: 'k',
          delaySeconds: 90_000,
          headers: { a: 'b' },
          baseUrl: 'http://localhost:4000',
        },
      ],
    ]);
  });
});
