// Stores the callbacks of a node, and refuses those that it did not sign: receiver.py in JavaScript.
//
//     POC_CALLBACK_SECRET=secret node receiver.mjs 9000     # Node.js 18 or newer, no packages
//
// A callback is one file, named by its key: the node repeats it until the answer is 2xx, and a
// repeated one replaces itself.

import { createHmac, timingSafeEqual } from "node:crypto";
import { mkdirSync, renameSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";

const secret = process.env.POC_CALLBACK_SECRET;
if (!secret) throw new Error("POC_CALLBACK_SECRET is not set");
const folder = process.env.STORE ?? "callbacks";
mkdirSync(folder, { recursive: true });

function isSigned(headers, endpoint, body) {
  const sentAt = headers["x-proofserve-timestamp"];
  const key = headers["idempotency-key"];
  const head = `v1\n${sentAt}\n${endpoint}\n${key}\n${headers["x-proofserve-sequence"]}\n`;
  const expected = Buffer.from("v1=" + createHmac("sha256", secret).update(head).update(body).digest("hex"));
  const given = Buffer.from(headers["x-proofserve-signature"] ?? "");
  // Without the time, who recorded a callback could send it again for ever.
  const isFresh = Math.abs(Date.now() / 1000 - Number(sentAt)) < 300;
  return isFresh && given.length === expected.length && timingSafeEqual(given, expected);
}

createServer(async (request, response) => {
  const parts = [];
  for await (const part of request) parts.push(part);
  const body = Buffer.concat(parts);
  const endpoint = request.url.split("/").pop();
  if (request.method !== "POST" || !isSigned(request.headers, endpoint, body)) {
    response.writeHead(401).end("not signed with the secret in the last five minutes\n");
    return;
  }
  const file = `${folder}/${endpoint}-${encodeURIComponent(request.headers["idempotency-key"])}.json`;
  writeFileSync(`${file}.part`, body, { flush: true });
  renameSync(`${file}.part`, file);
  response.writeHead(204).end();
}).listen(Number(process.argv[2]), "127.0.0.1");
