// A process of the pub/sub benchmark: one js-libp2p node with GossipSub, driven by the JSON lines of pubsub_worker.py.
//
// Its packages are those of tests/interop, so bench/pubsub/benchmark.py runs this text in that directory.
import { randomBytes } from 'node:crypto'
import { createInterface } from 'node:readline'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { gossipsub } from '@libp2p/gossipsub'
import { identify } from '@libp2p/identify'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'

const TOPIC = 'bench'
const MESH_CHECK_MS = 20
const TAIL = randomBytes(1_048_576)

// The machine's monotonic clock, the same as Python's time.monotonic().
const clockS = () => Number(process.hrtime.bigint()) / 1e9
const sleep = async (ms) => await new Promise((resolve) => setTimeout(resolve, ms))
const percentile = (ordered, fraction) => ordered[Math.min(ordered.length - 1, Math.trunc(ordered.length * fraction))]

let node
let published = 0
let seen = new Set()
let again = 0
let agesS = []
let lastAtS = 0
let wanted = -1
let reached = () => {}

function receive (data) {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength)
  const key = view.getUint32(8) * 0x1_0000_0000 + view.getUint32(12)
  if (seen.has(key)) {
    again++
    return
  }
  seen.add(key)
  lastAtS = clockS()
  agesS.push(lastAtS - view.getFloat64(0))
  if (seen.size === wanted) reached()
}

function makeMessage (publisher, number, sizeBytes) {
  const data = Buffer.allocUnsafe(sizeBytes)
  TAIL.copy(data, 16, 0, sizeBytes - 16)
  data.writeDoubleBE(clockS(), 0)
  data.writeUInt32BE(publisher, 8)
  data.writeUInt32BE(number, 12)
  return data
}

const commands = {
  async hello () {
    return {}
  },
  async open () {
    await node?.stop()
    node = await createLibp2p({
      addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
      transports: [tcp()],
      connectionEncrypters: [noise()],
      streamMuxers: [yamux()],
      connectionMonitor: { enabled: false },
      // Its defaults refuse the connections of ten nodes of one address.
      connectionManager: { inboundConnectionThreshold: Infinity, maxIncomingPendingConnections: 1_000 },
      services: { identify: identify(), pubsub: gossipsub({ allowPublishToZeroTopicPeers: true }) }
    })
    node.services.pubsub.addEventListener('gossipsub:message', (event) => receive(event.detail.msg.data))
    node.services.pubsub.subscribe(TOPIC)
    return { text: String(node.getMultiaddrs()[0]) }
  },
  async connect ({ address }) {
    await node.dial(multiaddr(address))
    return {}
  },
  async meshed ({ count }) {
    while (node.services.pubsub.getMeshPeers(TOPIC).length < count) await sleep(MESH_CHECK_MS)
    return { count: node.services.pubsub.getMeshPeers(TOPIC).length }
  },
  async reset () {
    seen = new Set()
    agesS = []
    again = 0
    return {}
  },
  async publish ({ publisher, count, size_bytes: sizeBytes, per_s: perS }) {
    const beganS = clockS()
    for (let number = 0; number < count; number++) {
      if (perS > 0) {
        const waitMs = (beganS + number / perS - clockS()) * 1000
        if (waitMs > 0) await sleep(waitMs)
      }
      await node.services.pubsub.publish(TOPIC, makeMessage(publisher, published++, sizeBytes))
    }
    return { began_s: beganS }
  },
  async reach ({ count, quiet_s: quietS }) {
    let had = -1
    wanted = count
    while (seen.size < count && seen.size !== had) {
      had = seen.size
      let timer
      await new Promise((resolve) => {
        reached = resolve
        timer = setTimeout(resolve, quietS * 1000)
      })
      clearTimeout(timer)
    }
    wanted = -1
    const ordered = agesS.length > 0 ? Float64Array.from(agesS).sort() : [0]
    return {
      count: seen.size,
      again,
      last_at_s: lastAtS,
      p50_ms: percentile(ordered, 0.5) * 1000,
      p99_ms: percentile(ordered, 0.99) * 1000
    }
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  const { command, arguments: given } = JSON.parse(line)
  let answer
  try {
    answer = await commands[command](given)
  } catch (error) {
    answer = { error: `${error.name}: ${error.message}` }
  }
  process.stdout.write(JSON.stringify(answer) + '\n')
}
process.exit(0)
