/** What is built is a World of the contract that `@workflow/world` stands for: see `tsconfig.contract-*.json`. */

import type { World } from '@workflow/world';

import { createWorld } from '../dist/index.js';

export const world: World = createWorld();
