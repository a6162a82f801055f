import {
  EntityConflictError,
  HookNotFoundError,
  RunExpiredError,
  RunNotSupportedError,
  ThrottleError,
  TooEarlyError,
  WorkflowRunNotFoundError,
  WorkflowWorldError,
} from '@workflow/errors';
import { describe, expect, onTestFinished, test } from 'vitest';

import { createWorld, type HoldfastWorld, type WorldOptions } from '../src/index.js';
import { refuse, serving, type Double } from './double.js';

const RUN = { runId: 'wrun_1', status: 'pending', createdAt: new Date(5), input: new Uint8Array([1]) };

function worldOf(double: Double, options: WorldOptions = {}): HoldfastWorld {
  const world = createWorld({ serverUrl: double.url, token: 'secret', retrySeconds: 5, ...options });
  onTestFinished(() => world.close());
  return world;
}

describe('calls', () => {
  test('nothing is connected to before the first call', async () => {
    const double = await serving(() => RUN);
    const world = worldOf(double);
    expect(world.specVersion).toBe(5);
    expect(await world.getDeploymentId()).toBe('dpl_holdfast');
    expect(double.sockets.size).toBe(0);
    expect(await world.runs.get('wrun_1', { resolveData: 'none' })).toEqual(RUN);
    expect(double.calls).toEqual([
      { method: 'runs.get', path: '/v1/runs.get', token: 'secret', fields: { runId: 'wrun_1', resolveData: 'none' } },
    ]);
  });

  test('each method has the fields of the protocol', async () => {
    const double = await serving((call) => (call.method === 'streams.list' ? { names: ['a'] } : {}));
    const world = worldOf(double);
    const pagination = { limit: 2, cursor: 'c', sortOrder: 'asc' as const };
    await world.runs.list({ workflowName: 'w', status: 'failed', pagination });
    await world.runs.experimentalSetAttributes!('r', [{ key: 'a', value: null }], { allowReservedAttributes: true });
    await world.steps.get('r', 's');
    await world.steps.list({ runId: 'r', pagination });
    await world.events.get('r', 'e', { resolveData: 'none' });
    await world.events.list({ runId: 'r', pagination, resolveData: 'all' });
    await world.events.listByCorrelationId({ correlationId: 'c' });
    await world.hooks.get('h');
    await world.hooks.getByToken('t');
    await world.hooks.list({ runId: 'r' });
    await world.streams.close('r', 'n');
    expect(await world.streams.list('r')).toEqual(['a']);
    await world.streams.getChunks('r', 'n', { limit: 3, cursor: 'c' });
    await world.streams.getInfo('r', 'n');
    await world.submit('shop:pack', ['a1'], { kwargs: { gift: true }, key: 'k' });
    expect(double.calls.map(({ method, fields: { operationId, ...fields } }) => [method, fields, typeof operationId])).toEqual([
      ['runs.list', { workflowName: 'w', status: 'failed', pagination }, 'undefined'],
      ['runs.setAttributes', { runId: 'r', changes: [{ key: 'a', value: null }], allowReservedAttributes: true }, 'string'],
      ['steps.get', { runId: 'r', stepId: 's' }, 'undefined'],
      ['steps.list', { runId: 'r', pagination }, 'undefined'],
      ['events.get', { runId: 'r', eventId: 'e', resolveData: 'none' }, 'undefined'],
      ['events.list', { runId: 'r', pagination, resolveData: 'all' }, 'undefined'],
      ['events.listByCorrelationId', { correlationId: 'c' }, 'undefined'],
      ['hooks.get', { hookId: 'h' }, 'undefined'],
      ['hooks.getByToken', { token: 't' }, 'undefined'],
      ['hooks.list', { runId: 'r' }, 'undefined'],
      ['streams.close', { runId: 'r', name: 'n' }, 'string'],
      ['streams.list', { runId: 'r' }, 'undefined'],
      ['streams.getChunks', { runId: 'r', name: 'n', limit: 3, cursor: 'c' }, 'undefined'],
      ['streams.getInfo', { runId: 'r', name: 'n' }, 'undefined'],
      ['submit', { task: 'shop:pack', args: ['a1'], kwargs: { gift: true }, key: 'k' }, 'string'],
    ]);
  });

  test('an event takes bytes and times there, and brings entities back', async () => {
    const double = await serving(() => ({ event: { eventId: 'evnt_1' }, run: RUN, cursor: null }));
    const event = {
      eventType: 'wait_created' as const,
      correlationId: 'wait_1',
      eventData: { resumeAt: new Date(7) },
      specVersion: 5,
    };
    const world = worldOf(double);
    expect(await world.events.create('wrun_1', event, { sinceCursor: 'c' })).toEqual({
      event: { eventId: 'evnt_1' },
      run: RUN,
      cursor: null,
    });
    expect(double.calls[0]!.fields).toEqual({
      runId: 'wrun_1',
      event,
      params: { sinceCursor: 'c' },
      operationId: expect.any(String) as string,
    });
  });

  test('a lost answer is asked for again, with the same operation id', async () => {
    let answers = 0;
    const double = await serving((_, response) => {
      answers += 1;
      if (answers < 3) {
        response.destroy();
        return undefined;
      }
      return { event: {} };
    });
    await worldOf(double).events.create('r', { eventType: 'run_cancelled' });
    const ids = double.calls.map(({ fields }) => fields.operationId);
    expect(ids).toHaveLength(3);
    expect(new Set(ids).size).toBe(1);
  });

  test('two writes have two operation ids', async () => {
    const double = await serving(() => ({}));
    const world = worldOf(double);
    await world.events.create('r', { eventType: 'run_cancelled' });
    await world.events.create('r', { eventType: 'run_cancelled' });
    expect(new Set(double.calls.map(({ fields }) => fields.operationId)).size).toBe(2);
  });

  test('a server that comes back is found again', async () => {
    const double = await serving(() => RUN);
    const world = worldOf(double, { retrySeconds: 30 });
    await world.runs.get('wrun_1');
    await double.stop();
    const answer = world.runs.get('wrun_1');
    await double.start();
    expect(await answer).toEqual(RUN);
  });

  test('a server that stays away is an error that passes', async () => {
    const double = await serving(() => RUN);
    await double.stop();
    const error = await worldOf(double, { retrySeconds: 0 }).runs.get('r').catch((reason: unknown) => reason);
    expect(WorkflowWorldError.is(error)).toBe(true);
    expect(error).toMatchObject({ status: 503, message: expect.stringContaining('ECONNREFUSED') as string });
  });

  test('an attempt without an answer is given up in time', async () => {
    const double = await serving(() => undefined);
    const world = worldOf(double, { timeoutSeconds: 0.05, retrySeconds: 0 });
    await expect(world.runs.get('r')).rejects.toMatchObject({ name: 'WorkflowWorldError', status: 503 });
  });

  test('a signal in the parameters ends a call', async () => {
    const aborter = new AbortController();
    const double = await serving(() => {
      aborter.abort(new Error('enough'));
    });
    const params: object = { signal: aborter.signal };
    await expect(worldOf(double).runs.get('r', params)).rejects.toThrow('enough');
    expect(double.calls[0]!.fields).toEqual({ runId: 'r' });
  });

  test('an answer that is no JSON is an error that passes', async () => {
    const double = await serving((_, response) => void response.end('<html>'));
    const world = worldOf(double, { retrySeconds: 0 });
    await expect(world.runs.get('r')).rejects.toMatchObject({ name: 'WorkflowWorldError', status: 503 });
  });

  test('worlds with the same options share a connection, until the last one closes it', async () => {
    const double = await serving(() => RUN);
    const [one, two] = [worldOf(double), worldOf(double)];
    await one.runs.get('r');
    await two.runs.get('r');
    expect(double.sockets.size).toBe(1);
    await one.close();
    await one.close();
    await expect(one.runs.get('r')).rejects.toThrow('closed');
    expect(await two.runs.get('r')).toEqual(RUN);
    await two.close();
    await expect(two.runs.get('r')).rejects.toThrow('closed');
    expect(await worldOf(double).runs.get('r')).toEqual(RUN);
  });

  test('closing ends calls that wait', async () => {
    const double = await serving(() => undefined);
    const world = worldOf(double);
    const answer = world.runs.get('r').catch((reason: unknown) => reason);
    await expect.poll(() => double.calls.length).toBe(1);
    await world.close();
    expect(await answer).toMatchObject({ message: 'the World is closed' });
  });
});

describe('errors', () => {
  test.each([
    [EntityConflictError, 'EntityConflictError', 409],
    [RunExpiredError, 'RunExpiredError', 410],
    [TooEarlyError, 'TooEarlyError', 425],
    [ThrottleError, 'ThrottleError', 429],
    [WorkflowRunNotFoundError, 'WorkflowRunNotFoundError', 404],
    [HookNotFoundError, 'HookNotFoundError', 404],
    [RunNotSupportedError, 'RunNotSupportedError', 409],
    [WorkflowWorldError, 'WorkflowWorldError', 400],
  ])('%o is known by its name', async (known, name, status) => {
    const double = await serving((_, response) => refuse(response, status, { name, message: 'why', retryAfter: 3 }));
    const error = await worldOf(double).hooks.getByToken('t').catch((reason: unknown) => reason);
    expect(error).toBeInstanceOf(Error);
    expect(known.is(error)).toBe(true);
    expect(error).toMatchObject({ name, status, message: 'why', retryAfter: 3, token: 't' });
    expect(double.calls).toHaveLength(1);
  });

  test('attributes that are refused are refused for good', async () => {
    const refusal = { name: 'AttributeValidationError', message: 'too long' };
    const double = await serving((_, response) => refuse(response, 400, refusal));
    await expect(worldOf(double).runs.experimentalSetAttributes!('r', [])).rejects.toMatchObject({ ...refusal, fatal: true });
  });

  test('a store that does not answer is asked again', async () => {
    let answers = 0;
    const double = await serving((_, response) => {
      answers += 1;
      return answers < 3 ? refuse(response, 503, { name: 'WorkflowWorldError', message: 'no primary' }) : RUN;
    });
    expect(await worldOf(double).runs.get('r')).toEqual(RUN);
  });

  test('a wrong token is said at once', async () => {
    const double = await serving((_, response) => refuse(response, 401, { name: 'Unauthorized', message: 'wrong token' }));
    await expect(worldOf(double).runs.get('r')).rejects.toMatchObject({ name: 'Unauthorized', status: 401 });
    expect(double.calls).toHaveLength(1);
  });
});
