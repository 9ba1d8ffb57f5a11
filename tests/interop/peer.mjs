// A js-libp2p peer for the interop tests: noise, yamux, tcp, identify, ping and three raw stream protocols.
//
//   node --import ./polyfill.mjs peer.mjs
//
// One command a line on stdin, one JSON object a line on stdout; each command gives exactly one object with its name:
//   dial ADDR | ping ADDR | protocols PEER | echo ADDR BYTES | send ADDR BYTES | fetch ADDR BYTES | many ADDR COUNT
//   hangup PEER | quit
// Events in between: ready, connect, disconnect, identify.
import { createHash } from 'node:crypto'
import { createInterface } from 'node:readline'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { identify } from '@libp2p/identify'
import { peerIdFromString } from '@libp2p/peer-id'
import { ping } from '@libp2p/ping'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'

const ECHO = '/dep2p-test/echo/1'
const SINK = '/dep2p-test/sink/1' // takes bytes up to the half-close, answers with their count and sha256
const SOURCE = '/dep2p-test/source/1' // takes a count of 8 bytes, answers with that many
const CHUNK = 65_536

const say = (object) => process.stdout.write(JSON.stringify(object) + '\n')

// The same bytes as the tests make: chunks that start with their number, so that none can stand for another.
function * generate (count) {
  for (let number = 0; count > 0; number++) {
    const chunk = Buffer.alloc(Math.min(CHUNK, count), number % 251)
    if (chunk.length >= 4) chunk.writeUInt32BE(number, 0)
    count -= chunk.length
    yield chunk
  }
}

async function sendAll (stream, chunks) {
  for (const chunk of chunks) {
    if (!stream.send(chunk)) await stream.onDrain()
  }
}

async function readAll (stream) {
  const hash = createHash('sha256')
  let bytes = 0
  for await (const part of stream) {
    const data = part.subarray()
    hash.update(data)
    bytes += data.length
  }
  return { bytes, sha256: hash.digest('hex') }
}

async function readText (stream) {
  const parts = []
  for await (const part of stream) parts.push(Buffer.from(part.subarray()))
  return Buffer.concat(parts).toString()
}

const node = await createLibp2p({
  addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  connectionMonitor: { enabled: false },
  services: { identify: identify(), ping: ping() }
})

const limits = { maxInboundStreams: 1_000, maxOutboundStreams: 1_000 }

await node.handle(ECHO, async (stream) => {
  for await (const part of stream) await sendAll(stream, [part])
  await stream.close()
}, limits)

await node.handle(SINK, async (stream) => {
  const seen = await readAll(stream)
  await sendAll(stream, [Buffer.from(JSON.stringify(seen))])
  await stream.close()
}, limits)

await node.handle(SOURCE, async (stream) => {
  let head = Buffer.alloc(0)
  for await (const part of stream) {
    head = Buffer.concat([head, Buffer.from(part.subarray())])
    if (head.length >= 8) break
  }
  await sendAll(stream, generate(Number(head.readBigUInt64BE(0))))
  await stream.close()
}, limits)

node.addEventListener('peer:connect', (event) => say({ event: 'connect', peer: event.detail.toString() }))
node.addEventListener('peer:disconnect', (event) => say({ event: 'disconnect', peer: event.detail.toString() }))
node.addEventListener('peer:identify', (event) => say({
  event: 'identify',
  peer: event.detail.peerId.toString(),
  agent: event.detail.agentVersion,
  protocols: event.detail.protocols,
  observed: event.detail.observedAddr?.toString()
}))

const commands = {
  async dial (addr) {
    const connection = await node.dial(multiaddr(addr))
    return { peer: connection.remotePeer.toString(), encryption: connection.encryption, multiplexer: connection.multiplexer }
  },
  async ping (addr) {
    return { ms: await node.services.ping.ping(multiaddr(addr)) }
  },
  async protocols (peer) {
    return { protocols: (await node.peerStore.get(peerIdFromString(peer))).protocols }
  },
  async echo (addr, bytes) {
    const stream = await node.dialProtocol(multiaddr(addr), ECHO)
    const sent = createHash('sha256')
    for (const chunk of generate(Number(bytes))) sent.update(chunk)
    const reading = readAll(stream)
    await sendAll(stream, generate(Number(bytes)))
    await stream.close()
    return { sent: sent.digest('hex'), ...await reading }
  },
  async send (addr, bytes) {
    const stream = await node.dialProtocol(multiaddr(addr), SINK)
    const answer = readText(stream)
    await sendAll(stream, generate(Number(bytes)))
    await stream.close()
    return { answer: JSON.parse(await answer) }
  },
  async fetch (addr, bytes) {
    const stream = await node.dialProtocol(multiaddr(addr), SOURCE)
    const count = Buffer.alloc(8)
    count.writeBigUInt64BE(BigInt(bytes), 0)
    await sendAll(stream, [count])
    const seen = await readAll(stream)
    await stream.close()
    return seen
  },
  async many (addr, count) {
    const texts = await Promise.all(Array.from({ length: Number(count) }, async (_, number) => {
      const stream = await node.dialProtocol(multiaddr(addr), ECHO, limits)
      await sendAll(stream, [Buffer.from(`stream ${number}`)])
      await stream.close()
      return await readText(stream)
    }))
    return { right: texts.filter((text, number) => text === `stream ${number}`).length }
  },
  async hangup (peer) {
    await node.hangUp(peerIdFromString(peer))
    return {}
  },
  async quit () {
    await node.stop()
    return {}
  }
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
