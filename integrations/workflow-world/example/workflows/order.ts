import { submit } from '@holdfast/workflow-world';
import { createHook, getStepMetadata, getWritable, sleep } from 'workflow';

export interface Approval {
  by: string;
}

/** Charge, wait for a person and a moment, have it packed, and say what happens on the way. */
export async function order(id: string, cents: number) {
  'use workflow';

  const receipt = await charge(id, cents);
  await tell(`charged: ${receipt}`);
  const approval: Approval = await createHook<Approval>({ token: `approve:${id}` });
  await sleep('1s');
  await tell(`approved by ${approval.by}`);
  await pack(id);
  return { receipt, ...approval };
}

async function charge(id: string, cents: number) {
  'use step';

  return `receipt-${id}-${cents}`;
}

async function tell(text: string) {
  'use step';

  const writer = getWritable<string>().getWriter();
  await writer.write(text);
  writer.releaseLock();
}

async function pack(id: string) {
  'use step';

  // A task in Python: see shop.py. With this key, a step that is tried again submits it once.
  return submit('shop:pack', [id], { key: getStepMetadata().stepId });
}
