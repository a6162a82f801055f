/** A Holdfast server as a child process: `holdfast world serve --child`. It ends when this process does. */

import { spawn, type ChildProcess } from 'node:child_process';
import { existsSync } from 'node:fs';
import { join } from 'node:path';

import { isRecord, StartFailed, textOf } from './errors.js';

const ARGUMENTS = ['world', 'serve', '--child', '--log-level', 'warning'];
const START_MS = 60_000;
const STOP_MS = 40_000; // the server itself waits 30 s for deliveries that are under way
const LAST_WORDS = 2000;

export interface ChildServer {
  readonly url: string;
  /** Resolves when the process has ended, with a text that says how. */
  readonly ended: Promise<string>;
  /** Let the server finish deliveries that are under way, and wait for its end. */
  stop(): Promise<void>;
}

type Environment = Readonly<Record<string, string | undefined>>;

export interface ChildOptions {
  readonly command: readonly string[] | undefined;
  /** Python app whose tasks may be submitted. */
  readonly app: string | undefined;
  readonly environment: Environment;
}

/** Start a server, and return it when it answers. Rejects with its last words if it does not come up. */
export async function startChild({ command, app, environment }: ChildOptions): Promise<ChildServer> {
  const options = [...ARGUMENTS, ...(app === undefined ? [] : ['--app', app])];
  const commands = (command === undefined ? guesses() : [command]).map((words) => [...words, ...options]);
  for (const words of commands) {
    const child = await spawned(words, environment);
    if (child === undefined) {
      continue;
    }
    try {
      return await listening(child, words);
    } catch (error) {
      if (command !== undefined || !textOf(error).includes('No module named holdfast')) {
        throw error;
      }
    }
  }
  const tried = commands.map((words) => words.join(' ')).join(', ');
  throw new StartFailed(
    `no holdfast to start a server with (tried: ${tried}). Install it (pip install "holdfast[mongo,monitor]"), ` +
      'name it by WORKFLOW_HOLDFAST_COMMAND, or give the address of a running server by WORKFLOW_HOLDFAST_SERVER',
  );
}

function guesses(): string[][] {
  const local = join(process.cwd(), '.venv', 'bin', 'holdfast');
  return [...(existsSync(local) ? [[local]] : []), ['holdfast'], ['python3', '-m', 'holdfast']];
}

/** Return the process, or undefined if there is no such program. */
function spawned(words: readonly string[], environment: Environment): Promise<ChildProcess | undefined> {
  const [program, ...rest] = words;
  const child = spawn(program!, rest, {
    env: Object.fromEntries(Object.entries({ ...process.env, ...environment }).filter(([, value]) => value !== undefined)),
    stdio: ['pipe', 'pipe', 'pipe'],
    // A group of its own: Ctrl-C in a terminal is for the application, which closes the World in its own time.
    detached: true,
  });
  return new Promise((resolve, reject) => {
    child.once('spawn', () => resolve(child));
    child.once('error', (error: NodeJS.ErrnoException) => {
      if (error.code === 'ENOENT') {
        resolve(undefined);
      } else {
        reject(new StartFailed(`could not start ${words.join(' ')}: ${textOf(error)}`, error));
      }
    });
  });
}

async function listening(child: ChildProcess, words: readonly string[]): Promise<ChildServer> {
  let lastWords = '';
  child.stderr!.on('data', (part: Buffer) => {
    lastWords = (lastWords + part.toString()).slice(-LAST_WORDS);
    process.stderr.write(part);
  });
  child.stdin!.on('error', () => undefined); // EPIPE, when it has ended
  const ended = new Promise<string>((resolve) => {
    child.once('close', (code, signal) => resolve(signal === null ? `exit code ${code}` : `signal ${signal}`));
  });
  const line = await Promise.race([
    firstLine(child),
    ended.then((how) => {
      throw new StartFailed(`${words.join(' ')} ended with ${how}: ${lastWords.trim() || 'it said nothing'}`);
    }),
    late(child, `${words.join(' ')} did not listen within ${START_MS / 1000} s`),
  ]);
  child.stdout!.resume();
  letProcessEnd(child);
  return { url: urlOf(line, child, words), ended, stop: () => stopped(child, ended) };
}

function firstLine(child: ChildProcess): Promise<string> {
  return new Promise((resolve) => {
    let text = '';
    const read = (part: Buffer) => {
      text += part.toString();
      const end = text.indexOf('\n');
      if (end >= 0) {
        child.stdout!.off('data', read);
        resolve(text.slice(0, end));
      }
    };
    child.stdout!.on('data', read);
  });
}

function late(child: ChildProcess, message: string): Promise<never> {
  return new Promise((_, reject) => {
    const timer = setTimeout(() => {
      child.kill('SIGKILL');
      reject(new StartFailed(message));
    }, START_MS);
    timer.unref();
    child.once('exit', () => clearTimeout(timer));
    child.stdout!.once('data', () => clearTimeout(timer));
  });
}

function urlOf(line: string, child: ChildProcess, words: readonly string[]): string {
  try {
    const said: unknown = JSON.parse(line);
    if (isRecord(said) && typeof said.url === 'string' && URL.canParse(said.url)) {
      return said.url.replace(/\/+$/, '');
    }
  } catch {
    // below
  }
  child.kill('SIGKILL');
  throw new StartFailed(`expected {"url": …} as the first line of ${words.join(' ')}, and got ${line.slice(0, 200)}`);
}

/** The child, and the pipes to it, do not keep this process alive. Their end is the end of the child. */
function letProcessEnd(child: ChildProcess): void {
  child.unref();
  for (const pipe of [child.stdin, child.stdout, child.stderr]) {
    (pipe as unknown as { unref?: () => void }).unref?.();
  }
}

async function stopped(child: ChildProcess, ended: Promise<string>): Promise<void> {
  child.ref();
  child.stdin!.end();
  const timer = setTimeout(() => child.kill('SIGKILL'), STOP_MS);
  await ended;
  clearTimeout(timer);
}
