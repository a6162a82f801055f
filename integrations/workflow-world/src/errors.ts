/** Errors as Workflow DevKit knows them: cores match `name`, and read `status`, `retryAfter`, `token`, `runId`. */

export interface ErrorFields {
  status: number;
  retryAfter?: number;
  cause?: unknown;
}

export class WorldError extends Error {
  readonly status: number;
  /** Seconds, with 425 and 429. */
  declare readonly retryAfter?: number;
  declare readonly runId?: string;
  declare readonly token?: string;
  /** No attempt at the same call can succeed: a step that raises this is not tried again. */
  declare readonly fatal?: true;

  constructor(name: string, message: string, { status, retryAfter, cause }: ErrorFields) {
    super(message, cause === undefined ? undefined : { cause });
    this.name = name;
    this.status = status;
    if (retryAfter !== undefined) {
      this.retryAfter = retryAfter;
    }
  }
}

/** What a call was about: fields that some classes carry. */
export interface Subject {
  runId?: unknown;
  token?: unknown;
}

/** Return the error of a response that is not 2xx. */
export function errorOf(status: number, body: unknown, subject: Subject = {}): WorldError {
  const given = fieldsOf(body);
  if (given === undefined) {
    // A proxy between us and the server, or something else that listens there.
    return new WorldError('WorkflowWorldError', `the Holdfast server answered HTTP ${status} without an error of its own`, {
      status,
    });
  }
  const error = new WorldError(given.name, given.message, { status: given.status ?? status, retryAfter: given.retryAfter });
  const { runId, token } = subject;
  return Object.assign(error, {
    ...(typeof runId === 'string' && { runId }),
    ...(typeof token === 'string' && { token }),
    ...(error.name === 'AttributeValidationError' && { fatal: true }),
  });
}

/** Return the error of a call that got no answer, whatever the reason. Cores take such errors for passing ones. */
export function unreachable(message: string, cause?: unknown): WorldError {
  return new WorldError('WorkflowWorldError', message, { status: 503, cause });
}

/** A server of our own that does not come up: the same attempt would fail again. */
export class StartFailed extends WorldError {
  constructor(message: string, cause?: unknown) {
    super('WorkflowWorldError', message, { status: 503, cause });
  }
}

interface Given {
  name: string;
  message: string;
  status?: number;
  retryAfter?: number;
}

function fieldsOf(body: unknown): Given | undefined {
  const error = isRecord(body) ? body.error : undefined;
  if (!isRecord(error) || typeof error.name !== 'string') {
    return undefined;
  }
  return {
    name: error.name,
    message: typeof error.message === 'string' ? error.message : error.name,
    status: typeof error.status === 'number' ? error.status : undefined,
    retryAfter: typeof error.retryAfter === 'number' ? error.retryAfter : undefined,
  };
}

export function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** Return what to print of something that was thrown. */
export function textOf(error: unknown): string {
  if (!(error instanceof Error)) {
    return String(error);
  }
  return error.message || (error as NodeJS.ErrnoException).code || error.name;
}
