import { spawn } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

import { beforeEach, describe, expect, onTestFinished, test, vi } from 'vitest';

import { createWorld, type HoldfastWorld, type WorldOptions } from '../src/index.js';

const FAKE = fileURLToPath(new URL('fake-holdfast.mjs', import.meta.url));

let log: string;

beforeEach(() => {
  const folder = mkdtempSync(join(tmpdir(), 'holdfast-world-'));
  log = join(folder, 'log');
  vi.stubEnv('FAKE_LOG', log);
  onTestFinished(() => rmSync(folder, { recursive: true }));
});

function worldOf(misbehaves = '', options: WorldOptions = {}): HoldfastWorld {
  vi.stubEnv('FAKE', misbehaves);
  const world = createWorld({ command: [process.execPath, FAKE], url: `sqlite:///${log}.db`, retrySeconds: 0, ...options });
  onTestFinished(() => world.close());
  return world;
}

interface Said {
  readonly arguments?: string[];
  readonly HOLDFAST_URL?: string;
  readonly path?: string;
  readonly isMine?: boolean;
  readonly pid?: number;
  readonly stopped?: number;
}

const said = (): Said[] => {
  const lines = readFileSync(log, 'utf8').trimEnd().split('\n');
  return lines.map((line) => JSON.parse(line) as Said);
};
const paths = () => said().flatMap(({ path }) => (path === undefined ? [] : [path]));
const pidOf = async (world: HoldfastWorld) => (await (world.runs.get('r') as Promise<unknown>)) as { pid: number };

describe('a server of our own', () => {
  test('is started by the first call, for all worlds of these options, and stopped by the last close', async () => {
    const [one, two] = [worldOf('', { app: 'shop:app' }), worldOf('', { app: 'shop:app' })];
    const [{ pid }, other] = await Promise.all([pidOf(one), pidOf(two)]);
    expect(other.pid).toBe(pid);
    expect(said()[0]).toMatchObject({ arguments: ['world', 'serve', '--child', '--log-level', 'warning', '--app', 'shop:app'], HOLDFAST_URL: `sqlite:///${log}.db` });
    expect(said().every(({ path, isMine }) => path === undefined || isMine)).toBe(true);
    await one.close();
    expect(said().some(({ stopped }) => stopped === pid)).toBe(false);
    await two.close();
    expect(said().some(({ stopped }) => stopped === pid)).toBe(true);
  });

  test('that crashes is replaced, and the call is made again', async () => {
    const world = worldOf('crashes', { retrySeconds: 20 });
    const answer = world.runs.get('r').catch((reason: unknown) => reason);
    await expect.poll(() => said().filter(({ pid }) => pid !== undefined).length, { timeout: 10_000 }).toBeGreaterThan(1);
    vi.stubEnv('FAKE', '');
    expect(await answer).toMatchObject({ pid: expect.any(Number) as number });
  });

  test('that is killed while nobody calls is replaced, and hears where to deliver', async () => {
    const world = worldOf('', { baseUrl: 'http://localhost:4000', retrySeconds: 20 });
    await world.start();
    const { pid } = await pidOf(world);
    process.kill(pid, 'SIGKILL');
    await expect.poll(() => paths().filter((path) => path === '/v1/start').length, { timeout: 10_000 }).toBe(2);
    expect((await pidOf(world)).pid).not.toBe(pid);
  });

  test('that does not come up says why, and the next call tries again', async () => {
    const world = worldOf('ends');
    const error = { status: 503, message: expect.stringMatching(/exit code 3: the store does not answer/) as string };
    await expect(world.runs.get('r')).rejects.toMatchObject(error);
    vi.stubEnv('FAKE', '');
    expect(await world.runs.get('r')).toMatchObject({ pid: expect.any(Number) as number });
  });

  test('that does not come up at the start comes up behind it', async () => {
    const world = worldOf('ends', { baseUrl: 'http://localhost:4000' });
    await expect(world.start()).rejects.toThrow('exit code 3');
    vi.stubEnv('FAKE', '');
    await expect.poll(() => paths(), { timeout: 10_000 }).toContain('/v1/start');
  });

  test('that prints something else is refused', async () => {
    await expect(worldOf('chatters').runs.get('r')).rejects.toThrow(/expected {"url": …} .* got hello/);
  });

  test('that is not installed says what to install', async () => {
    const world = worldOf('', { command: '/nowhere/holdfast' });
    await expect(world.runs.get('r')).rejects.toThrow(/tried: \/nowhere\/holdfast world serve.*pip install/);
  });

  test('does not keep its program alive, and ends with it', async () => {
    const index = fileURLToPath(new URL('../dist/index.js', import.meta.url));
    const program = `
      import { createWorld } from ${JSON.stringify(index)};
      const world = createWorld({ command: [${JSON.stringify(process.execPath)}, ${JSON.stringify(FAKE)}] });
      await world.runs.get('r');
    `;
    const child = spawn(process.execPath, ['--input-type=module', '--eval', program], { stdio: 'inherit' });
    expect(await new Promise((resolve) => child.once('exit', resolve))).toBe(0);
    await expect.poll(() => said().some(({ stopped }) => stopped !== undefined)).toBe(true);
  });
});
