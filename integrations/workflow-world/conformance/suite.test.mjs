// The vendor's suite. Each test starts an application of its own, which loads the World from `../dist`, or another one.
import { createTestSuite } from '@workflow/world-testing';

createTestSuite(process.env.SUITE_WORLD ?? '../dist/index.js');
