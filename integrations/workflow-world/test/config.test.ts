import { describe, expect, test } from 'vitest';

import { addressOf, settingsOf, type WorldOptions } from '../src/config.js';

const store = (options: WorldOptions, environment = {}) => settingsOf(options, environment).connection.environment;

describe('settings', () => {
  test('defaults are those of the original', () => {
    expect(store({})).toEqual({
      HOLDFAST_URL: undefined,
      WORKFLOW_MONGODB_URI: 'mongodb://localhost:27017',
      WORKFLOW_MONGODB_DATABASE_NAME: 'workflow',
      WORKFLOW_MONGODB_CHANGE_STREAMS: 'true',
      WORKFLOW_CONCURRENCY: '20',
      WORKFLOW_SERVICE_URL: undefined,
    });
    expect(settingsOf({}, {}).specVersion).toBe(5);
    expect(addressOf(settingsOf({}, {}), { PORT: '4321' })).toBe('http://localhost:4321');
  });

  test('code is before environment, and environment before default', () => {
    const environment = {
      WORKFLOW_MONGODB_URI: 'mongodb://env',
      WORKFLOW_MONGODB_DATABASE_NAME: 'env',
      WORKFLOW_MONGODB_CHANGE_STREAMS: 'false',
      WORKFLOW_CONCURRENCY: '3',
      WORKFLOW_SERVICE_URL: 'http://env:1/',
    };
    expect(store({}, environment)).toMatchObject({ ...environment, WORKFLOW_SERVICE_URL: 'http://env:1/' });
    expect(addressOf(settingsOf({}, environment), { PORT: '4321' })).toBe('http://env:1');
    const code = { mongoUrl: 'mongodb://code', databaseName: 'code', useChangeStreams: true, concurrency: 4 };
    expect(store({ ...code, baseUrl: 'http://code:2' }, environment)).toEqual({
      HOLDFAST_URL: undefined,
      WORKFLOW_MONGODB_URI: 'mongodb://code',
      WORKFLOW_MONGODB_DATABASE_NAME: 'code',
      WORKFLOW_MONGODB_CHANGE_STREAMS: 'true',
      WORKFLOW_CONCURRENCY: '4',
      WORKFLOW_SERVICE_URL: 'http://code:2',
    });
  });

  test('another store replaces MongoDB, and what the environment says of it', () => {
    const environment = { WORKFLOW_MONGODB_URI: 'mongodb://env' };
    expect(store({ url: 'sqlite:///a.db' }, environment)).toMatchObject({
      HOLDFAST_URL: 'sqlite:///a.db',
      WORKFLOW_MONGODB_URI: undefined,
    });
    expect(store({}, { HOLDFAST_URL: 'sqlite:///b.db' })).toMatchObject({ HOLDFAST_URL: 'sqlite:///b.db' });
    expect(store({}, { ...environment, HOLDFAST_URL: 'sqlite:///b.db' })).toMatchObject({
      WORKFLOW_MONGODB_URI: 'mongodb://env',
      HOLDFAST_URL: undefined,
    });
  });

  test.each([2, 3, 4, 5, 6, 7])('spec version %i may be announced', (specVersion) => {
    expect(settingsOf({ specVersion }, {}).specVersion).toBe(specVersion);
    expect(settingsOf({}, { WORKFLOW_SPEC_VERSION: String(specVersion) }).specVersion).toBe(specVersion);
  });

  test.each<[string, WorldOptions, Record<string, string>, RegExp]>([
    ['spec version 1', { specVersion: 1 }, {}, /specVersion .* is 1; expected .* from 2 to 7/],
    ['spec version 8', {}, { WORKFLOW_SPEC_VERSION: '8' }, /WORKFLOW_SPEC_VERSION\) is 8/],
    ['no concurrency', { concurrency: 0 }, {}, /concurrency .* is 0/],
    ['a concurrency in words', {}, { WORKFLOW_CONCURRENCY: 'many' }, /WORKFLOW_CONCURRENCY\) is many/],
    ['a base URL without a scheme', { baseUrl: 'localhost:3000' }, {}, /baseUrl .* is "localhost:3000"/],
    ['a base URL of another scheme', {}, { WORKFLOW_SERVICE_URL: 'ftp://host' }, /WORKFLOW_SERVICE_URL/],
    ['a server URL without a scheme', { serverUrl: '127.0.0.1:9' }, {}, /serverUrl/],
    ['deliveries to the server itself', { serverUrl: 'http://h:9', baseUrl: 'http://h:9/x' }, {}, /server itself/],
    ['SQLite as MongoDB', { mongoUrl: 'sqlite:///a.db' }, {}, /for SQLite use url/],
    ['two stores', { mongoUrl: 'mongodb://h', url: 'sqlite:///a.db' }, {}, /both given/],
    ['a flag that is none', {}, { WORKFLOW_MONGODB_CHANGE_STREAMS: 'maybe' }, /true or false/],
  ])('refused: %s', (_, options, environment, message) => {
    expect(() => settingsOf(options, environment)).toThrow(message);
  });

  test('no message has a password', () => {
    expect(() => settingsOf({ mongoUrl: 'http://me:secret@host' }, {})).toThrow(/^(?!.*secret)/);
  });
});
