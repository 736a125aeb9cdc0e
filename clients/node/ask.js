// Asks an agent and prints its answer. Nothing of ours but the schemas: a client in any language looks like this.
//
//   npm ci --ignore-scripts
//   node ask.js ADDRESS WORKSPACE PROMPT
//
// ADDRESS is host:port or unix:/path of a coordinator, WORKSPACE the directory that the agent works in, on the machine
// of its operation manager. UNREAL_AGENT_TOKEN is sent as bearer token; UNREAL_AGENT_LLM_PROVIDER and _LLM_MODEL choose
// the model, else the coordinator does. Exit code: 0 answered, 1 failed (one line says why), 2 wrong usage.
import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const SCHEMAS = process.env.UNREAL_AGENT_PROTO ?? fileURLToPath(new URL("../../proto", import.meta.url));
const ATTEMPTS = 8;
const CALL_LIMIT_MS = 30_000;

function connect(address) {
  // Numbers of 64 bits stay strings: JavaScript's own are exact only to 2^53.
  const definition = loadSync("unreal_agent/coordinator/v1/coordinator_service.proto", {
    includeDirs: [SCHEMAS],
    keepCase: true,
    longs: String,
    enums: String,
    oneofs: true,
  });
  const { CoordinatorService } = grpc.loadPackageDefinition(definition).unreal_agent.coordinator.v1;
  return new CoordinatorService(address, grpc.credentials.createInsecure(), {
    "grpc.enable_http_proxy": 0,
    "grpc.max_receive_message_length": 64 << 20,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 2000,
  });
}

function credentials() {
  const metadata = new grpc.Metadata();
  const token = process.env.UNREAL_AGENT_TOKEN;
  if (token) metadata.set("authorization", `Bearer ${token}`);
  return metadata;
}

// Every change carries an ID of ours, so that repeating it after a lost answer is harmless.
async function call(client, method, request) {
  const once = () =>
    new Promise((resolve, reject) => {
      const options = { deadline: Date.now() + CALL_LIMIT_MS };
      client[method](request, credentials(), options, (error, answer) => (error ? reject(error) : resolve(answer)));
    });
  for (let attempt = 1; ; attempt += 1) {
    try {
      return await once();
    } catch (error) {
      if (error.code !== grpc.status.UNAVAILABLE || attempt === ATTEMPTS) throw error;
      await sleep(100 * 2 ** attempt * Math.random());
    }
  }
}

// Yields what is recorded after a revision, until the session rests. A watch that breaks goes on behind the last
// revision that was seen: nothing is missed and nothing comes twice.
async function* watch(client, sessionId, afterRevision) {
  let revision = afterRevision;
  for (let failures = 0; ; ) {
    const request = { session_id: sessionId, after_revision: revision, until_idle: true };
    const events = client.WatchSession(request, credentials());
    try {
      for await (const event of events) {
        failures = 0;
        if (event.change) revision = event.change.revision;
        yield event;
        if (event.rest_reached) return;
      }
    } catch (error) {
      const canResume = [grpc.status.UNAVAILABLE, grpc.status.RESOURCE_EXHAUSTED].includes(error.code);
      failures += 1;
      if (!canResume || failures === ATTEMPTS) throw error;
      await sleep(100 * 2 ** failures * Math.random());
    } finally {
      events.cancel();
    }
  }
}

function textOf(response) {
  const items = response.output?.items ?? [];
  return items.flatMap((item) => (item.message ? [item.message.text] : [])).join("\n");
}

async function ask(client, workspace, prompt) {
  const sessionId = `node-${randomUUID()}`;
  const settings = {
    provider: process.env.UNREAL_AGENT_LLM_PROVIDER,
    model: process.env.UNREAL_AGENT_LLM_MODEL,
    workspace,
  };
  await call(client, "CreateSession", { session_id: sessionId, settings });
  const input = { input_id: randomUUID(), content: { parts: [{ text: { text: prompt } }] } };
  const accepted = await call(client, "SubmitInput", { session_id: sessionId, input });
  let answer = "";
  for await (const event of watch(client, sessionId, accepted.revision)) {
    for (const item of event.change?.items ?? []) {
      if (item.model_response) answer = textOf(item.model_response);
    }
    const rest = event.rest_reached?.rest;
    if (rest && rest.session_state !== "SESSION_STATE_IDLE") {
      throw new Error(`session ${sessionId} rests as ${rest.session_state}: ${rest.reason}`);
    }
  }
  return answer;
}

const [address, workspace, prompt] = process.argv.slice(2);
if (!prompt) {
  console.error("usage: node ask.js ADDRESS WORKSPACE PROMPT");
  process.exit(2);
}
const client = connect(address);
try {
  console.log(await ask(client, workspace, prompt));
} catch (error) {
  console.error(`failed: ${error.message}`);
  process.exitCode = 1;
} finally {
  client.close();
}
