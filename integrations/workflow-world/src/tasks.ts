/** Tasks in Python, submitted by TypeScript: work that a step hands on. */

import type { Connection } from './connection.js';

export interface SubmitOptions {
  /** Arguments by name. */
  kwargs?: Record<string, unknown>;
  /** Idempotency key: one key, one call. In a step, `getStepMetadata().stepId` makes each attempt the same call. */
  key?: string;
}

export interface Tasks {
  /** Submit a task of the server's app, as `shop:pack`. Returns the id of its invocation, once that is stored. */
  submit(task: string, args?: readonly unknown[], options?: SubmitOptions): Promise<string>;
}

export function createTasks(use: () => Connection): Tasks {
  return {
    async submit(task, args = [], options = {}) {
      const { id } = await use().write<{ id: string }>('submit', { task, args, ...options });
      return id;
    },
  };
}
