import { defineConfig } from 'vitest/config';

export default defineConfig({ test: { include: ['*.test.mjs'], setupFiles: ['./node-20.mjs'] } });
