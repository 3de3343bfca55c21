import type { DynamoEnvironment } from "../../config/engine-config.ts";
import { NatsLink } from "../nats/link.ts";
import { natsOptions } from "../nats/options.ts";
import { PlaneError } from "../request-plane/request-plane.ts";
import { NatsEventPlane } from "./nats-publisher.ts";
import type { EventPlane } from "./topic-publisher.ts";
import { ZmqTopicPublisher } from "./zmq-publisher.ts";

/** The event plane that DYN_EVENT_PLANE names. @param host IP that publishers bind and advertise. @throws PlaneError, UsageError, in one line */
export async function openEventPlane(environment: DynamoEnvironment, host: string): Promise<EventPlane> {
  if (environment.eventPlane === "nats") return new NatsEventPlane(await NatsLink.open(natsOptions(environment)));
  return {
    publisher: (topic) =>
      ZmqTopicPublisher.start(topic, host).catch((error: unknown) => {
        throw new PlaneError(`DYN_TCP_RPC_HOST, POD_IP: no port for events on ${host}: ${(error as Error).message}`);
      }),
    close: async () => {},
  };
}
