/**
 * Options: code, else environment, else default. Read by `createWorld()`; nothing is connected to. Variables that only
 * this package knows begin with WORKFLOW_: those that begin with HOLDFAST_ are settings of the server, which refuses
 * others.
 */

export interface WorldOptions {
  /** MongoDB connection string. Environment: WORKFLOW_MONGODB_URI. Default: mongodb://localhost:27017 */
  mongoUrl?: string;
  /** Database. Environment: WORKFLOW_MONGODB_DATABASE_NAME. Default: workflow */
  databaseName?: string;
  /** Another store of Holdfast, as `sqlite:///workflow.db`, instead of `mongoUrl`. Environment: HOLDFAST_URL */
  url?: string;
  /** Address of this application, for deliveries. Environment: WORKFLOW_SERVICE_URL. Default: http://localhost:{PORT} */
  baseUrl?: string;
  /** Deliveries at once. Environment: WORKFLOW_CONCURRENCY. Default: 20 */
  concurrency?: number;
  /** Hear of news by change streams, else by polling. Environment: WORKFLOW_MONGODB_CHANGE_STREAMS. Default: true */
  useChangeStreams?: boolean;
  /** Address of a running `holdfast world serve`. Environment: WORKFLOW_HOLDFAST_SERVER. Default: start one as a child process */
  serverUrl?: string;
  /** Bearer token of that server. Environment: HOLDFAST_WORLD_TOKEN. */
  token?: string;
  /** Spec version to announce, 2 to 7. Environment: WORKFLOW_SPEC_VERSION. Default: 5 */
  specVersion?: number;
  /** Python app whose tasks steps may submit, as `shop:app`. Environment: HOLDFAST_APP. Default: none */
  app?: string;
  /** How to call `holdfast`. Environment: WORKFLOW_HOLDFAST_COMMAND. Default: .venv/bin/holdfast, holdfast, python3 -m holdfast */
  command?: string | readonly string[];
  /** How long a call is repeated while the server does not answer. Default: 60 */
  retrySeconds?: number;
  /** How long one attempt of a call may last. Default: 30 */
  timeoutSeconds?: number;
}

export interface Settings {
  readonly specVersion: number;
  readonly baseUrl: string | undefined;
  readonly deploymentId: string;
  readonly connection: ConnectionSettings;
}

/** What makes a connection: worlds with the same settings share one. */
export interface ConnectionSettings {
  readonly serverUrl: string | undefined;
  readonly token: string | undefined;
  readonly app: string | undefined;
  readonly command: readonly string[] | undefined;
  /** What a child server has in its environment; undefined removes what this process has. */
  readonly environment: Readonly<Record<string, string | undefined>>;
  readonly retrySeconds: number;
  readonly timeoutSeconds: number;
}

export const OLDEST_SPEC = 2;
export const NEWEST_SPEC = 7;
const DEFAULT_SPEC = 5;

type Environment = Readonly<Record<string, string | undefined>>;

/** Return the settings. Throws Error naming the option or variable that is wrong. */
export function settingsOf(options: WorldOptions = {}, environment: Environment = process.env): Settings {
  const env = (name: string) => environment[name]?.trim() || undefined;
  const baseUrl = options.baseUrl ?? env('WORKFLOW_SERVICE_URL');
  const serverUrl = options.serverUrl ?? env('WORKFLOW_HOLDFAST_SERVER');
  const settings: Settings = {
    specVersion: numberOf('specVersion', options.specVersion, 'WORKFLOW_SPEC_VERSION', env, DEFAULT_SPEC, OLDEST_SPEC, NEWEST_SPEC),
    baseUrl: baseUrl === undefined ? undefined : httpUrl('baseUrl (WORKFLOW_SERVICE_URL)', baseUrl),
    deploymentId: env('DEPLOYMENT_ID') ?? 'dpl_holdfast',
    connection: {
      serverUrl: serverUrl === undefined ? undefined : httpUrl('serverUrl (WORKFLOW_HOLDFAST_SERVER)', serverUrl),
      token: options.token ?? env('HOLDFAST_WORLD_TOKEN'),
      app: options.app ?? env('HOLDFAST_APP'),
      command: commandOf(options.command ?? env('WORKFLOW_HOLDFAST_COMMAND')),
      environment: storeOf(options, env),
      retrySeconds: options.retrySeconds ?? 60,
      timeoutSeconds: options.timeoutSeconds ?? 30,
    },
  };
  if (settings.baseUrl !== undefined) {
    refuseOwnServer(settings.baseUrl, settings.connection.serverUrl);
  }
  return settings;
}

/** Return the address at which this program takes deliveries. PORT is read late: servers set it when they listen. */
export function addressOf(settings: Settings, environment: Environment = process.env): string {
  const port = environment.PORT?.trim() || '3000';
  const address = settings.baseUrl ?? httpUrl('PORT', `http://localhost:${port}`);
  refuseOwnServer(address, settings.connection.serverUrl);
  return address;
}

function refuseOwnServer(baseUrl: string, serverUrl: string | undefined): void {
  if (serverUrl !== undefined && new URL(baseUrl).origin === new URL(serverUrl).origin) {
    throw new Error(`baseUrl ${baseUrl} is the Holdfast server itself; expected the address of this application`);
  }
}

type Env = (name: string) => string | undefined;

function storeOf(options: WorldOptions, env: Env): Record<string, string | undefined> {
  if (options.url !== undefined && options.mongoUrl !== undefined) {
    throw new Error('url and mongoUrl are both given; expected one of them');
  }
  const shared = {
    WORKFLOW_CONCURRENCY: String(numberOf('concurrency', options.concurrency, 'WORKFLOW_CONCURRENCY', env, 20, 1, 10_000)),
    WORKFLOW_SERVICE_URL: options.baseUrl ?? env('WORKFLOW_SERVICE_URL'),
  };
  const mongoUrl = options.mongoUrl ?? (options.url === undefined ? env('WORKFLOW_MONGODB_URI') : undefined);
  const url = options.url ?? (mongoUrl === undefined ? env('HOLDFAST_URL') : undefined);
  if (url !== undefined) {
    return { ...shared, HOLDFAST_URL: url, WORKFLOW_MONGODB_URI: undefined, WORKFLOW_MONGODB_DATABASE_NAME: undefined };
  }
  const found = mongoUrl ?? 'mongodb://localhost:27017';
  if (!/^mongodb(\+srv)?:\/\//.test(found)) {
    throw new Error('mongoUrl (WORKFLOW_MONGODB_URI) does not begin with mongodb:// or mongodb+srv://; for SQLite use url');
  }
  return {
    ...shared,
    HOLDFAST_URL: undefined,
    WORKFLOW_MONGODB_URI: found,
    WORKFLOW_MONGODB_DATABASE_NAME: options.databaseName ?? env('WORKFLOW_MONGODB_DATABASE_NAME') ?? 'workflow',
    WORKFLOW_MONGODB_CHANGE_STREAMS: String(options.useChangeStreams ?? flagOf('WORKFLOW_MONGODB_CHANGE_STREAMS', env, true)),
  };
}

function httpUrl(what: string, text: string): string {
  const url = URL.canParse(text) ? new URL(text) : undefined;
  if (url === undefined || !['http:', 'https:'].includes(url.protocol) || url.hostname === '') {
    throw new Error(`${what} is ${JSON.stringify(text)}; expected an address as http://localhost:3000`);
  }
  return text.replace(/\/+$/, '');
}

function numberOf(
  name: string,
  given: number | undefined,
  variable: string,
  env: Env,
  otherwise: number,
  least: number,
  most: number,
): number {
  const text = env(variable);
  const value = given ?? (text === undefined ? otherwise : Number(text));
  if (!Number.isInteger(value) || value < least || value > most) {
    throw new Error(`${name} (${variable}) is ${given ?? text}; expected a whole number from ${least} to ${most}`);
  }
  return value;
}

const FLAGS: Readonly<Record<string, boolean>> = { true: true, '1': true, false: false, '0': false };

function flagOf(variable: string, env: Env, otherwise: boolean): boolean {
  const text = env(variable);
  const value = text === undefined ? otherwise : FLAGS[text.toLowerCase()];
  if (value === undefined) {
    throw new Error(`${variable} is ${text}; expected true or false`);
  }
  return value;
}

function commandOf(given: string | readonly string[] | undefined): readonly string[] | undefined {
  const words = typeof given === 'string' ? given.split(/\s+/).filter(Boolean) : given;
  return words === undefined || words.length === 0 ? undefined : words;
}
