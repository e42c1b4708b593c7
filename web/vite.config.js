import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { gzipSync } from "node:zlib";
import { defineConfig } from "vite";

/** Each text asset once more, compressed, beside itself: the server compresses nothing. */
const zipped = {
  name: "octavo-zipped",
  writeBundle(options) {
    const folder = join(options.dir, "assets");
    for (const name of readdirSync(folder)) {
      if (/\.(js|css|svg)$/.test(name)) {
        const data = readFileSync(join(folder, name));
        writeFileSync(join(folder, name + ".gz"), gzipSync(data, { level: 9 }));
      }
    }
  },
};

export default defineConfig({
  base: "./",
  plugins: [zipped],
  esbuild: { jsx: "automatic", jsxImportSource: "preact", legalComments: "none" },
  build: {
    outDir: "../octavo/web",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
  },
  // `npm run dev` beside `octavo serve`: the API is that server's.
  server: { proxy: { "/v1": { target: "http://127.0.0.1:8000", changeOrigin: true } } },
});
