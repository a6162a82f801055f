/** What compiles here fits into cores of 4.x, of the suite, and of the newest release. */

import type { World } from '@workflow/world';
import type { World as World4 } from 'world-4';
import type { World as Newest } from 'world-newest';

import { createWorld } from '../src/index.js';

export const ofSuite: World = createWorld();
export const of4: World4 = createWorld();
export const newest: Newest = createWorld();
