// The vendor's suite. Each test starts an application of its own, which loads the World from `../dist`.
import { createTestSuite } from '@workflow/world-testing';

createTestSuite('../dist/index.js');
