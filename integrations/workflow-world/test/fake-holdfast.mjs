// A program that starts as `holdfast world serve --child` does. FAKE says how it misbehaves.
import { appendFileSync } from 'node:fs';
import { createServer } from 'node:http';

const { FAKE, FAKE_LOG, HOLDFAST_WORLD_TOKEN, HOLDFAST_URL, WORKFLOW_MONGODB_URI } = process.env;
const say = (what) => appendFileSync(FAKE_LOG, `${JSON.stringify(what)}\n`);

say({ arguments: process.argv.slice(2), HOLDFAST_URL, WORKFLOW_MONGODB_URI, pid: process.pid });
if (FAKE === 'ends') {
  console.error('the store does not answer');
  process.exit(3);
}
if (FAKE === 'chatters') {
  console.log('hello');
}
const server = createServer((request, response) => {
  const isMine = request.headers.authorization === `Bearer ${HOLDFAST_WORLD_TOKEN}`;
  say({ path: request.url, isMine });
  request.resume().on('end', () => {
    if (request.url === '/v1/runs.get' && FAKE === 'crashes') {
      process.exit(9);
    }
    response.end(JSON.stringify({ pid: process.pid }));
  });
});
server.listen(0, '127.0.0.1', () => console.log(JSON.stringify({ url: `http://127.0.0.1:${server.address().port}` })));
process.stdin.resume().on('end', () => {
  say({ stopped: process.pid });
  process.exit(0);
});
