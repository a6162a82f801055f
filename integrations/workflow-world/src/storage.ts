/** Runs, steps, events and hooks: each call is one call of the server. */

import type { Storage } from '@workflow/world';

import type { Connection } from './connection.js';

export function createStorage(use: () => Connection): Storage {
  // Async, so that what `use` throws is a rejection as well.
  const call = async (method: string, fields: Record<string, unknown>): Promise<unknown> => use().call(method, fields);
  const write = async (method: string, fields: Record<string, unknown>): Promise<unknown> => use().write(method, fields);
  const storage = {
    runs: {
      get: (runId: string, params?: object) => call('runs.get', { ...params, runId }),
      list: (params?: object) => call('runs.list', { ...params }),
      experimentalSetAttributes: (runId: string, changes: unknown[], options?: object) =>
        write('runs.setAttributes', { ...options, runId, changes }),
    },
    steps: {
      get: (runId: string | undefined, stepId: string, params?: object) => call('steps.get', { ...params, runId, stepId }),
      list: (params: object) => call('steps.list', { ...params }),
    },
    events: {
      create: (runId: string | null, event: object, params?: object) =>
        write('events.create', { runId, event, params: params ?? {} }),
      get: (runId: string, eventId: string, params?: object) => call('events.get', { ...params, runId, eventId }),
      list: (params: object) => call('events.list', { ...params }),
      listByCorrelationId: (params: object) => call('events.listByCorrelationId', { ...params }),
    },
    hooks: {
      get: (hookId: string, params?: object) => call('hooks.get', { ...params, hookId }),
      getByToken: (token: string, params?: object) => call('hooks.getByToken', { ...params, token }),
      list: (params?: object) => call('hooks.list', { ...params }),
    },
  };
  // What the server answers has the form that the contract says; the conformance suite checks it.
  return storage as Storage;
}
