// An application with one workflow: it takes orders and approvals, and the deliveries of the World.
import { createServer } from 'node:http';
import { Readable } from 'node:stream';
import { getRun, resumeHook, start } from 'workflow/api';
import { getWorld } from 'workflow/runtime';

import flow from './.well-known/workflow/v1/flow.js';
import manifest from './.well-known/workflow/v1/manifest.json' with { type: 'json' };
import step from './.well-known/workflow/v1/step.js';

const { order } = manifest.workflows['workflows/order.ts'];

const routes = [
  ['POST', /^\/\.well-known\/workflow\/v1\/flow$/, (request) => flow.POST(request)],
  ['POST', /^\/\.well-known\/workflow\/v1\/step$/, (request) => step.POST(request)],
  ['POST', /^\/orders$/, async (request) => {
    const { id, cents } = await request.json();
    const run = await start(order, [id, cents]);
    return Response.json({ runId: run.runId });
  }],
  ['POST', /^\/orders\/(\w+)\/approve$/, async (request, id) => {
    const { runId } = await resumeHook(`approve:${id}`, await request.json());
    return Response.json({ runId });
  }],
  ['GET', /^\/runs\/(\w+)$/, async (_, id) => {
    const run = getRun(id);
    const status = await run.status;
    return Response.json({ status, result: status === 'completed' ? await run.returnValue : undefined });
  }],
  ['GET', /^\/runs\/(\w+)\/words$/, (_, id) => new Response(getRun(id).readable.pipeThrough(lines()))],
];

function lines() {
  return new TransformStream({ transform: (text, to) => to.enqueue(new TextEncoder().encode(`${text}\n`)) });
}

async function answer(incoming) {
  const url = new URL(incoming.url, 'http://localhost');
  for (const [method, path, handle] of routes) {
    const found = incoming.method === method && path.exec(url.pathname);
    if (found) {
      const body = method === 'POST' ? Readable.toWeb(incoming) : undefined;
      return handle(new Request(url, { method, headers: incoming.headers, body, duplex: 'half' }), ...found.slice(1));
    }
  }
  return new Response('no such page\n', { status: 404 });
}

const server = createServer(async (incoming, outgoing) => {
  const response = await answer(incoming).catch((error) => new Response(`${error}\n`, { status: 500 }));
  outgoing.writeHead(response.status, Object.fromEntries(response.headers));
  if (response.body) {
    Readable.fromWeb(response.body).on('error', () => outgoing.destroy()).pipe(outgoing);
  } else {
    outgoing.end();
  }
});

server.listen(Number(process.env.PORT ?? 3000), '127.0.0.1', async () => {
  process.env.PORT = String(server.address().port);
  await getWorld().start(); // from here on, messages are delivered to this program
  console.log(`listening on http://127.0.0.1:${process.env.PORT}`);
});

process.once('SIGTERM', async () => {
  server.close();
  await getWorld().close();
  process.exit(0);
});
