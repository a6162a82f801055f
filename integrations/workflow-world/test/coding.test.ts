import { describe, expect, test } from 'vitest';

import { fromJson, toJson } from '../src/coding.js';

const VALUES: [string, unknown][] = [
  ['bytes', new Uint8Array([0, 1, 255])],
  ['no bytes', new Uint8Array()],
  ['a time', new Date(1_700_000_000_123)],
  ['null within data', { a: null, b: [null, 1] }],
  ['an object that looks like bytes', { $b: 'AAEC' }],
  ['an object that looks like a time', { $d: 5 }],
  ['a quoted object', { $o: { $b: 'AAEC' } }],
  ['marks beside others', { $b: 'AAEC', other: new Date(0) }],
  ['nesting', { a: [{ b: new Uint8Array([7]) }, { $d: new Date(9) }] }],
  ['a null byte and other signs', 'a\0b\u2028😀'],
];

describe('the JSON of the protocol', () => {
  test.each(VALUES)('%s comes back', (_, value) => {
    expect(fromJson(toJson(value))).toEqual(value);
  });

  test('a field that is undefined is left out', () => {
    expect(toJson({ a: undefined, b: 1 })).toBe('{"b":1}');
  });

  test('a field __proto__ is a field', () => {
    const value = fromJson('{"__proto__": {"isAdmin": true}, "a": 1}') as object;
    expect(Object.getPrototypeOf(value)).toBe(Object.prototype);
    expect(Object.keys(value)).toEqual(['__proto__', 'a']);
    expect(toJson(value)).toBe('{"__proto__":{"isAdmin":true},"a":1}');
  });

  test('bytes have a buffer of their own', () => {
    const bytes = fromJson('{"$b": "AAEC"}') as Uint8Array;
    expect(bytes.buffer.byteLength).toBe(3);
    expect(Buffer.isBuffer(bytes)).toBe(false);
  });

  test('a view gives its part of a buffer only', () => {
    expect(toJson(new Uint8Array([1, 2, 3, 4]).subarray(1, 3))).toBe('{"$b":"AgM="}');
  });

  test('a time that is none is refused', () => {
    expect(() => toJson({ at: new Date(Number.NaN) })).toThrow(/Invalid Date/);
  });
});
