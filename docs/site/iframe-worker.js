// A browser starts no worker for a page opened from the disk, so there the search's script runs in a frame of its own.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = Object.assign(document.createElement("iframe"), { hidden: true })
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = Object.assign(inside.document.createElement("script"), { src: address })
      const ready = new Promise(resolve => (script.onload = resolve))
      inside.document.head.append(script)
      this.postMessage = data => ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
  }
