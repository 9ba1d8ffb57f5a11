// A js-libp2p GossipSub node that a test commands over stdin, a command a line; it answers and tells events as JSON lines.
//   node --import ./polyfill.mjs pubsub_peer.mjs [--sign=none] [--ids=go|sha256] [--version=1.1.0] [--key=HEX] [--no-mesh]
//   dial ADDR | hangup PEER | subscribe TOPIC | unsubscribe TOPIC | publish TOPIC TEXT | burst TOPIC COUNT BYTES
//   state TOPIC | quit
// Events in between: ready, connect, disconnect, message, sent (what this node's RPCs asked for).
import { createHash } from 'node:crypto'
import { createInterface } from 'node:readline'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { generateKeyPairFromSeed } from '@libp2p/crypto/keys'
import { gossipsub, StrictNoSign } from '@libp2p/gossipsub'
import { identify } from '@libp2p/identify'
import { peerIdFromString } from '@libp2p/peer-id'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'

const say = (object) => process.stdout.write(JSON.stringify(object) + '\n')
const option = (name) => process.argv.find((arg) => arg.startsWith(`--${name}`))?.split('=')[1] ?? ''
const has = (name) => process.argv.includes(`--${name}`)
const sha256 = (bytes) => new Uint8Array(createHash('sha256').update(bytes).digest())

const options = { allowPublishToZeroTopicPeers: true }
if (option('sign') === 'none') options.globalSignaturePolicy = StrictNoSign
if (option('ids') === 'sha256') options.msgIdFn = (message) => sha256(message.data)
if (option('ids') === 'go') {
  options.msgIdFn = (message) => {
    const author = message.from.toMultihash().bytes
    const id = Buffer.alloc(author.length + 8)
    id.set(author)
    id.writeBigUInt64BE(message.sequenceNumber, author.length)
    return new Uint8Array(id)
  }
}
// In no mesh and without flooding, its messages travel by IHAVE and IWANT only.
if (has('no-mesh')) Object.assign(options, { D: 0, Dlo: 0, Dhi: 0, Dout: 0, Dscore: 0, floodPublish: false })

const seed = option('key')
const node = await createLibp2p({
  privateKey: seed === '' ? undefined : await generateKeyPairFromSeed('Ed25519', Buffer.from(seed, 'hex')),
  addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  connectionMonitor: { enabled: false },
  connectionManager: { inboundConnectionThreshold: Infinity, maxIncomingPendingConnections: 1000 },
  services: {
    identify: identify(),
    pubsub: (components) => {
      const made = gossipsub(options)(components)
      if (option('version') !== '') made.protocols = [`/meshsub/${option('version')}`]
      return made
    }
  }
})
const pubsub = node.services.pubsub

const got = { count: 0, bytes: 0, copies: 0 }
let isQuiet = false
pubsub.addEventListener('gossipsub:message', (event) => {
  const { msg, msgId } = event.detail
  got.count++
  got.bytes += msg.data.length
  if (!isQuiet) {
    const text = new TextDecoder().decode(msg.data.subarray(0, 80))
    say({ event: 'message', topic: msg.topic, text, from: msg.from?.toString(), id: Buffer.from(msgId, 'base64').toString('hex') })
  }
})
const receive = pubsub.handleReceivedRpc.bind(pubsub)
pubsub.handleReceivedRpc = async (from, rpc) => {
  got.copies += rpc.messages?.length ?? 0
  return receive(from, rpc)
}
node.addEventListener('peer:connect', (event) => say({ event: 'connect', peer: event.detail.toString() }))
node.addEventListener('peer:disconnect', (event) => say({ event: 'disconnect', peer: event.detail.toString() }))

const commands = {
  async dial (addr) { return { peer: (await node.dial(multiaddr(addr))).remotePeer.toString() } },
  async hangup (peer) { await node.hangUp(peerIdFromString(peer)); return {} },
  async subscribe (topic) { pubsub.subscribe(topic); return {} },
  async unsubscribe (topic) { pubsub.unsubscribe(topic); return {} },
  async publish (topic, ...words) {
    const result = await pubsub.publish(topic, new TextEncoder().encode(words.join(' ')))
    return { recipients: result.recipients.map(String) }
  },
  async burst (topic, count, bytes) {
    isQuiet = true
    for (let number = 0; number < Number(count); number++) {
      const data = Buffer.alloc(Number(bytes))
      data.writeUInt32BE(number, 0)
      await pubsub.publish(topic, data)
    }
    return {}
  },
  async quiet () { isQuiet = true; return {} },
  async state (topic) {
    return {
      ...got,
      subscribers: pubsub.getSubscribers(topic).map(String),
      mesh: pubsub.getMeshPeers(topic),
      protocols: [...pubsub.streamsOutbound].map(([peer, stream]) => [peer, stream.protocol])
    }
  },
  async quit () { await node.stop(); return {} }
}

say({ event: 'ready', peer: node.peerId.toString(), addrs: node.getMultiaddrs().map(String) })

for await (const line of createInterface({ input: process.stdin })) {
  const [name, ...args] = line.trim().split(' ')
  try {
    say({ command: name, ok: true, ...await commands[name](...args) })
  } catch (error) {
    say({ command: name, ok: false, error: `${error.name}: ${error.message}` })
  }
  if (name === 'quit') process.exit(0)
}
