// libp2p 3 calls Promise.withResolvers, which Node has from version 22 on.
if (Promise.withResolvers === undefined) {
  Promise.withResolvers = function () {
    let resolve, reject
    const promise = new this((first, second) => {
      resolve = first
      reject = second
    })
    return { promise, resolve, reject }
  }
}
