/** A World for Workflow DevKit on a Holdfast server: runs, queue and streams on MongoDB or SQLite. */

import type { Queue, Storage } from '@workflow/world';

import { addressOf, settingsOf, type WorldOptions } from './config.js';
import { connectionOf, type Connection } from './connection.js';
import { unreachable } from './errors.js';
import { createQueue } from './queue.js';
import { createStorage } from './storage.js';
import { createStreams, type Streams } from './streams.js';
import { createTasks, type SubmitOptions, type Tasks } from './tasks.js';

export type { WorldOptions } from './config.js';
export { WorldError } from './errors.js';
export type { SubmitOptions } from './tasks.js';

/** A World for cores of 5.x, with the streams of 4.x beside. It is assignable to `World` of either. */
export interface HoldfastWorld extends Queue, Storage, Streams, Tasks {
  readonly specVersion: number;
  start(): Promise<void>;
  close(): Promise<void>;
}

/**
 * Return a World. It connects with its first call, and delivers messages after `start()`. Worlds with the same options
 * share one connection.
 */
export function createWorld(options: WorldOptions = {}): HoldfastWorld {
  const settings = settingsOf(options);
  let connection: Connection | undefined;
  let isClosed = false;
  const use = (): Connection => {
    if (isClosed) {
      throw unreachable('the World is closed');
    }
    if (connection === undefined) {
      connection = connectionOf(settings.connection);
      connection.acquire();
    }
    return connection;
  };
  return {
    specVersion: settings.specVersion,
    ...createQueue(use, settings.deploymentId),
    ...createStorage(use),
    ...createStreams(use),
    ...createTasks(use),
    async start() {
      await use().start(addressOf(settings));
    },
    async close() {
      isClosed = true;
      await connection?.release();
      connection = undefined;
    },
  };
}

let ofEnvironment: HoldfastWorld | undefined;

/** Submit a Python task by the World that the environment names: for steps, which have no World at hand. */
export function submit(task: string, args?: readonly unknown[], options?: SubmitOptions): Promise<string> {
  ofEnvironment ??= createWorld();
  return ofEnvironment.submit(task, args, options);
}

export default createWorld;
