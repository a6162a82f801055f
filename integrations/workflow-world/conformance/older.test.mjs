import { createTestSuite } from 'world-testing-19';
createTestSuite('../dist/index.js');
