// The package and the real server: what the suite does not ask for.
import { createServer } from 'node:http';
import { Readable } from 'node:stream';

import {
  EntityConflictError,
  HookNotFoundError,
  RunExpiredError,
  TooEarlyError,
  WorkflowRunNotFoundError,
  WorkflowWorldError,
} from '@workflow/errors';
import { EventSchema, HookSchema, StepSchema, WorkflowRunSchema } from '@workflow/world';
import { monotonicFactory } from 'ulid';
import { afterAll, describe, expect, onTestFinished, test } from 'vitest';

import { createWorld } from '../dist/index.js';

const ulid = monotonicFactory();
const world = createWorld();
const bytes = (text) => new TextEncoder().encode(`devl${JSON.stringify([text])}`);
const failure = (promise) => promise.then(() => undefined, (reason) => reason);

afterAll(() => world.close());

async function newRun() {
  const runId = `wrun_${ulid()}`;
  const eventData = { deploymentId: 'dpl_1', workflowName: 'wf', input: bytes('in'), attributes: { kind: 'test' } };
  await world.events.create(runId, { eventType: 'run_created', specVersion: 5, eventData });
  return runId;
}

const send = (runId, eventType, correlationId, eventData) =>
  world.events.create(runId, { eventType, specVersion: 5, ...(correlationId && { correlationId }), ...(eventData && { eventData }) });

describe('runs', () => {
  test('a run goes its way, and its parts fit the schemas of the contract', async () => {
    const runId = await newRun();
    const started = await send(runId, 'run_started');
    expect(WorkflowRunSchema.parse(started.run)).toMatchObject({ runId, status: 'running', input: bytes('in'), attributes: { kind: 'test' } });
    expect(started.run.startedAt).toBeInstanceOf(Date);
    const step = await send(runId, 'step_started', 'step_1', { stepName: 'add', input: bytes('args') });
    expect(step.stepCreated).toBe(true);
    expect(StepSchema.parse(step.step)).toMatchObject({ stepId: 'step_1', status: 'running', attempt: 1, input: bytes('args') });
    const retryAfter = new Date(Date.now() + 3_600_000);
    await send(runId, 'step_retrying', 'step_1', { stepName: 'add', error: bytes('no'), retryAfter });
    expect((await world.steps.get(runId, 'step_1')).retryAfter).toEqual(retryAfter);
    const early = await failure(send(runId, 'step_started', 'step_1', { stepName: 'add' }));
    expect(TooEarlyError.is(early)).toBe(true);
    expect(early.retryAfter).toBeGreaterThan(3500);
    const hook = await send(runId, 'hook_created', 'hook_1', { token: `token ${runId}`, metadata: bytes('meta') });
    expect(HookSchema.parse(hook.hook)).toMatchObject({ hookId: 'hook_1', metadata: bytes('meta') });
    expect(await world.hooks.getByToken(`token ${runId}`)).toMatchObject({ runId, hookId: 'hook_1' });
    const ended = await send(runId, 'run_completed', undefined, { output: bytes('out\0') });
    expect(WorkflowRunSchema.parse(ended.run)).toMatchObject({ status: 'completed', output: bytes('out\0') });
    const { data } = await world.events.list({ runId });
    expect(data.map((event) => EventSchema.parse(event).eventType)).toEqual([
      'run_created', 'run_started', 'step_created', 'step_started', 'step_retrying', 'hook_created', 'run_completed',
    ]);
    expect(data.map(({ eventId }) => eventId)).toEqual(data.map((_, at) => `evnt_${String(at + 1).padStart(26, '0')}`));
  });

  test('refusals have the classes of the contract', async () => {
    const runId = await newRun();
    expect(EntityConflictError.is(await failure(send(runId, 'run_created', undefined, {
      deploymentId: 'd', workflowName: 'wf', input: bytes('again'),
    })))).toBe(true);
    await send(runId, 'hook_created', 'hook_1', { token: `t ${runId}` });
    await send(runId, 'run_cancelled');
    expect(RunExpiredError.is(await failure(send(runId, 'run_started')))).toBe(true);
    expect(EntityConflictError.is(await failure(send(runId, 'run_completed', undefined, { output: bytes('x') })))).toBe(true);
    expect((await send(runId, 'run_cancelled')).run.status).toBe('cancelled');
    const gone = await failure(world.hooks.getByToken(`t ${runId}`));
    expect([HookNotFoundError.is(gone), gone.token, gone.status]).toEqual([true, `t ${runId}`, 404]);
    const missing = await failure(world.runs.get(`wrun_${ulid()}`));
    expect([WorkflowRunNotFoundError.is(missing), missing.status]).toEqual([true, 404]);
    const unknown = await failure(send(runId, 'run_exploded'));
    expect([WorkflowWorldError.is(unknown), unknown.status]).toEqual([true, 400]);
  });

  test('pages follow each other both ways', async () => {
    const runId = await newRun();
    await send(runId, 'run_started');
    for (let at = 0; at < 5; at++) {
      await send(runId, 'step_created', `step_${at}`, { stepName: 's', input: bytes('x') });
    }
    for (const sortOrder of ['asc', 'desc']) {
      const steps = [];
      let page;
      do {
        page = await world.steps.list({ runId, pagination: { limit: 2, sortOrder, cursor: page?.cursor ?? undefined } });
        steps.push(...page.data.map(({ stepId }) => stepId));
      } while (page.hasMore);
      const all = ['step_0', 'step_1', 'step_2', 'step_3', 'step_4'];
      expect(steps).toEqual(sortOrder === 'asc' ? all : all.reverse());
    }
    const slim = await world.runs.get(runId, { resolveData: 'none' });
    expect([slim.runId, slim.input]).toEqual([runId, undefined]);
  });
});

describe('streams', () => {
  const textsOf = async (stream) => {
    const texts = [];
    for await (const chunk of stream) {
      texts.push(Buffer.from(chunk).toString());
    }
    return texts;
  };

  test('are read live, from the start, from an index and from the end', async () => {
    const runId = await newRun();
    const name = `strm_${runId.slice(5)}_user`;
    const live = textsOf(await world.streams.get(runId, name));
    await Promise.all([
      world.streams.write(runId, name, 'a'),
      world.streams.write(runId, name, new Uint8Array([98])),
      world.streams.writeMulti(runId, name, ['c', 'd']),
    ]);
    expect(await world.streams.getInfo(runId, name)).toEqual({ tailIndex: 3, done: false });
    const fromEnd = textsOf(await world.streams.get(runId, name, -2));
    await world.streams.write(runId, name, 'e');
    await world.streams.close(runId, name);
    expect(await live).toEqual(['a', 'b', 'c', 'd', 'e']);
    expect(await fromEnd).toEqual(['c', 'd', 'e']);
    expect(await textsOf(await world.streams.get(runId, name, 3))).toEqual(['d', 'e']);
    expect(await textsOf(await world.readFromStream(name, 4))).toEqual(['e']);
    expect(await world.streams.list(runId)).toEqual([name]);
    const page = await world.streams.getChunks(runId, name, { limit: 2 });
    expect([page.data.map(({ index, data }) => [index, Buffer.from(data).toString()]), page.hasMore]).toEqual([[[0, 'a'], [1, 'b']], true]);
    const rest = await world.streams.getChunks(runId, name, { cursor: page.cursor });
    expect([rest.data.map(({ index }) => index), rest.done]).toEqual([[2, 3, 4], true]);
  });

  test('of a name alone, and of a run that is not there, as health checks of 4.x use them', async () => {
    const name = `__health_check__${ulid()}`;
    const early = world.readFromStream(name).then(textsOf);
    const runId = `wrun_${ulid()}`;
    await world.writeToStream(name, runId, 'healthy');
    await world.closeStream(name, runId);
    expect(await early).toEqual(['healthy']);
    expect(await textsOf(await world.readFromStream(name))).toEqual(['healthy']);
    expect(await textsOf(await world.streams.get(runId, name))).toEqual(['healthy']);
  });
});

describe('messages', () => {
  test('are delivered after start(), again when asked for, and once per key', async () => {
    const own = createWorld({ retrySeconds: 61 }); // a connection of its own
    const prefix = '__wkf_workflow_';
    const got = [];
    const handle = own.createQueueHandler(prefix, async (message, { attempt, messageId }) => {
      got.push({ message, attempt, messageId });
      const deliveries = got.filter((delivery) => delivery.messageId === messageId).length;
      if (message.again && deliveries === 1) {
        return { timeoutSeconds: 0 };
      }
      if (message.fails && deliveries === 1) {
        throw new Error('not yet');
      }
      return undefined;
    });
    const server = createServer(async (incoming, outgoing) => {
      const init = { method: 'POST', headers: incoming.headers, body: Readable.toWeb(incoming), duplex: 'half' };
      const response = await handle(new Request('http://localhost/', init));
      outgoing.writeHead(response.status).end(await response.text());
    });
    await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
    onTestFinished(async () => {
      await own.close();
      server.closeAllConnections();
      server.close();
    });
    const runId = `wrun_${ulid()}`;
    const options = { idempotencyKey: ulid() };
    const [one, two] = await Promise.all([
      own.queue(`${prefix}wf`, { runId, again: true, input: bytes('in') }, options),
      own.queue(`${prefix}wf`, { runId, again: true, input: bytes('in') }, options),
    ]);
    expect(one.messageId).toBe(two.messageId);
    expect(got).toEqual([]);
    process.env.PORT = String(server.address().port);
    await own.start();
    await expect.poll(() => got.length, { timeout: 10_000 }).toBe(2);
    expect(got).toEqual([1, 1].map((attempt) => ({ message: { runId, again: true, input: bytes('in') }, attempt, messageId: one.messageId })));
    const three = await own.queue(`${prefix}wf`, { runId, fails: true }, options);
    expect(three.messageId).not.toBe(one.messageId);
    await expect.poll(() => got.length, { timeout: 10_000 }).toBe(4);
    expect(got.at(-1)).toMatchObject({ attempt: 2, messageId: three.messageId });
  }, 30_000);
});
