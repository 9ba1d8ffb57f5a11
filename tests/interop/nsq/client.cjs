// nsqjs, driven by lines of JSON: a reader when a channel is given, else a writer.
const readline = require('node:readline')
const nsq = require('nsqjs')

const options = JSON.parse(process.argv[2])
const held = new Map()
const tell = (fields) => process.stdout.write(JSON.stringify(fields) + '\n')

let client
function connect() {
  const [host, port] = options.address.split(':')
  client = new nsq.Writer(host, Number(port))
  client.on('ready', () => setImmediate(tell, { event: 'started' }))
  client.on('closed', () => setTimeout(connect, 300))
  client.on('error', () => {})
  client.connect()
}
if (options.channel) {
  client = new nsq.Reader(options.topic, options.channel, {
    nsqdTCPAddresses: [options.address],
    lookupdPollInterval: 1,
    maxInFlight: options.max_in_flight,
    messageTimeout: options.msg_timeout_ms ?? null,
    heartbeatInterval: options.heartbeat_s ?? 30,
  })
  client.on('message', (message) => {
    held.set(message.id, message)
    tell({ event: 'message', id: message.id, attempts: message.attempts, body: message.body.toString() })
  })
  client.on('error', (error) => tell({ event: 'error', text: String(error) }))
  client.on('nsqd_connected', () => tell({ event: 'connected' }))
  client.on('nsqd_closed', () => tell({ event: 'closed' }))
  client.connect()
} else {
  connect()
}
const take = (id) => {
  const message = held.get(id)
  held.delete(id)
  return message
}
const actions = {
  publish({ topic, bodies, delay_ms: delayMs, number }) {
    const answer = (error) => tell({ event: 'answer', number, error: error ? String(error) : null })
    if (delayMs) client.deferPublish(topic, [bodies[0]], delayMs, answer) // one, in an array: 0.13.0 refuses it bare
    else client.publish(topic, bodies.length === 1 ? bodies[0] : bodies, answer)
  },
  finish: ({ id }) => take(id).finish(),
  requeue: ({ id, delay_ms: delayMs }) => take(id).requeue(delayMs, false),
  touch: ({ id }) => held.get(id).touch(),
  close: () => client.close(),
}
readline.createInterface({ input: process.stdin }).on('line', (line) => {
  const command = JSON.parse(line)
  actions[command.do](command)
}).on('close', () => process.exit(0))
if (options.channel) tell({ event: 'started' })
