// k6: gRPC with nothing but reflection to know the service by; several users stream at once. Each check must hold.

import { check } from "k6";
import { Client, Stream, StatusInvalidArgument, StatusOK } from "k6/net/grpc";

const from = (name) => __ENV[`OCTAVO_CLIENTS_${name}`];
const authorized = { metadata: { authorization: `Bearer ${from("KEY")}` } };
const service = "octavo.v1.GenerationService";
const client = new Client();

export const options = { vus: 4, iterations: 12, thresholds: { checks: ["rate==1"] } };

export default function () {
  client.connect(from("GRPC"), { plaintext: true, reflect: true, reflectMetadata: authorized.metadata });
  const models = client.invoke(`${service}/ListModels`, {}, authorized);
  check(models, {
    models: (answer) => answer.status === StatusOK && answer.message.models.some((found) => found.id === from("MODEL")),
  });
  const refused = client.invoke(`${service}/Tokenize`, { text: "a", model: "no-such-model" }, authorized);
  check(refused, { refusal: (answer) => answer.status !== StatusOK && answer.error.details.length > 0 });
  generate();
}

function generate() {
  const stream = new Stream(client, `${service}/Generate`, authorized);
  const kinds = [];
  const tokens = [];
  stream.on("data", (event) => {
    const kind = ["started", "delta", "finished", "usage"].find((name) => event[name]);
    if (kind) kinds.push(kind);
    if (kind === "delta") tokens.push(...event.delta.tokenIds);
  });
  stream.on("error", (error) => check(error, { "stream without an error": () => false }) || console.error(error.message));
  stream.on("end", () => {
    client.close();
    check(kinds, {
      "stream with each of its events": (found) =>
        found[0] === "started" && found.at(-2) === "finished" && found.at(-1) === "usage" && tokens.length === 12,
    });
  });
  stream.write({
    text: "The capital of France is",
    sampling: { temperature: 0 },
    stopping: { maxNewTokens: 12, ignoreEos: true },
  });
  stream.end();
}
