import type { DynamoEnvironment } from "../../config/engine-config.ts";
import { NatsLink } from "../nats/link.ts";
import { natsOptions } from "../nats/options.ts";
import type { Dial } from "./dispatch.ts";
import { localAddress, reachableAddress } from "./local-address.ts";
import { NatsRequestPlane } from "./nats-plane.ts";
import { PlaneError, type RequestPlane } from "./request-plane.ts";
import { ResponseStream } from "./response-stream.ts";
import { TcpRequestPlane } from "./tcp-server.ts";
import { tcpTls } from "./tls.ts";

/** The request plane that DYN_REQUEST_PLANE names. @throws PlaneError, UsageError, in one line, naming the variable */
export async function openRequestPlane(environment: DynamoEnvironment): Promise<RequestPlane> {
  const { tcpRpcHost, podIp, tcpRpcPort: port, tcpMaxMessageSize: maxMessageSize } = environment;
  const host = reachableAddress(tcpRpcHost ?? podIp ?? localAddress());
  const source = tcpRpcHost === null && podIp !== null ? "POD_IP" : "DYN_TCP_RPC_HOST";
  const tls = tcpTls(environment);
  const dial: Dial = (target) => ResponseStream.open(target, tls.dial);
  if (environment.requestPlane === "nats") return new NatsRequestPlane(await NatsLink.open(natsOptions(environment)), host, dial);
  try {
    return await TcpRequestPlane.listen({ host, port, maxMessageSize, tls: tls.listener, dial });
  } catch (error) {
    throw new PlaneError(`${source}, DYN_TCP_RPC_PORT: cannot listen on ${host}:${port}: ${(error as Error).message}`);
  }
}
