/** The JSON of the protocol: bytes are `{"$b": base64}`, times `{"$d": milliseconds}`; `{"$o": …}` quotes such objects. */

const MARKS = new Set(['$b', '$d', '$o']);

type Json = null | boolean | number | string | Json[] | { [key: string]: Json };

/** Return the JSON text of a value. Fields that are undefined are left out. */
export function toJson(value: unknown): string {
  return JSON.stringify(encode(value));
}

/** Return the value of a JSON text. Throws SyntaxError if it is none. */
export function fromJson(text: string): unknown {
  return decode(JSON.parse(text) as Json);
}

function encode(value: unknown): unknown {
  if (typeof value !== 'object' || value === null) {
    return value;
  }
  if (ArrayBuffer.isView(value)) {
    return { $b: Buffer.from(value.buffer, value.byteOffset, value.byteLength).toString('base64') };
  }
  if (value instanceof ArrayBuffer) {
    return { $b: Buffer.from(value).toString('base64') };
  }
  if (value instanceof Date) {
    if (Number.isNaN(value.getTime())) {
      throw new TypeError('a time in a request to the World is no time (Invalid Date)');
    }
    return { $d: value.getTime() };
  }
  if (Array.isArray(value)) {
    return value.map(encode);
  }
  if ('toJSON' in value && typeof value.toJSON === 'function') {
    return encode((value.toJSON as () => unknown)());
  }
  const fields = Object.entries(value).filter(([, field]) => field !== undefined);
  // fromEntries, since `object['__proto__'] = …` would change the prototype.
  const object: unknown = Object.fromEntries(fields.map(([key, field]) => [key, encode(field)]));
  return fields.length === 1 && MARKS.has(fields[0]![0]) ? { $o: object } : object;
}

function decode(value: Json): unknown {
  if (typeof value !== 'object' || value === null) {
    return value;
  }
  if (Array.isArray(value)) {
    return value.map(decode);
  }
  const keys = Object.keys(value);
  if (keys.length === 1) {
    const inner = value[keys[0]!];
    if (keys[0] === '$b' && typeof inner === 'string') {
      return new Uint8Array(Buffer.from(inner, 'base64')); // a copy: small Buffers share one ArrayBuffer
    }
    if (keys[0] === '$d' && typeof inner === 'number') {
      return new Date(inner);
    }
    if (keys[0] === '$o' && typeof inner === 'object' && inner !== null && !Array.isArray(inner)) {
      return decodeFields(inner);
    }
  }
  return decodeFields(value);
}

function decodeFields(object: Record<string, Json>): unknown {
  return Object.fromEntries(Object.entries(object).map(([key, field]) => [key, decode(field)]));
}
