/** Messages: how they are sent, and the handler that takes deliveries. */

import type { Queue } from '@workflow/world';

import { fromJson } from './coding.js';
import type { Connection } from './connection.js';
import { textOf } from './errors.js';

type Handler = Parameters<Queue['createQueueHandler']>[1];
type Meta = Parameters<Handler>[1];

export function createQueue(use: () => Connection, deploymentId: string): Queue {
  return {
    getDeploymentId: () => Promise.resolve(deploymentId),
    async queue(queueName, message, options) {
      const connection = use();
      const { idempotencyKey, delaySeconds, headers } = options ?? {};
      const { baseUrl } = connection;
      return connection.write('queue', { queueName, message, idempotencyKey, delaySeconds, headers, baseUrl });
    },
    createQueueHandler: (prefix, handler) => (request) => handled(prefix, handler, request),
  };
}

async function handled(prefix: string, handler: Handler, request: Request): Promise<Response> {
  const queueName = request.headers.get('x-vqs-queue-name');
  const messageId = request.headers.get('x-vqs-message-id');
  const attempt = Number(request.headers.get('x-vqs-message-attempt'));
  if (queueName === null || messageId === null || !Number.isInteger(attempt) || attempt < 1) {
    return refusal(400, 'the headers x-vqs-queue-name, x-vqs-message-id and x-vqs-message-attempt are not all there');
  }
  if (!queueName.startsWith(prefix)) {
    return refusal(400, `the queue ${queueName} is not one of ${prefix}`);
  }
  let message: unknown;
  try {
    message = fromJson(await request.text());
  } catch {
    return refusal(400, 'the body is no JSON');
  }
  try {
    const result = await handler(message, { queueName, messageId, attempt } as Meta);
    // 0 is "at once", and not "done".
    return Response.json(typeof result?.timeoutSeconds === 'number' ? { timeoutSeconds: result.timeoutSeconds } : {});
  } catch (error) {
    return refusal(500, textOf(error));
  }
}

function refusal(status: number, message: string): Response {
  return Response.json({ error: { message } }, { status });
}
