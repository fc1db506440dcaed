/* The search of a page that is opened from the disk: browsers refuse workers there, so that an iframe takes the place
   of one. The theme's search finds it as `IFrameWorker`, and its messages are those of a Worker. */
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentDocument;
      inner.open();
      inner.write(`<body><script>
        postMessage = data => parent.dispatchEvent(new MessageEvent("message", {data, source: window}));
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
          const script = Object.assign(document.createElement("script"), {src: url, onload: done, onerror: failed});
          document.body.append(script);
        })), Promise.resolve());
      <\/script><script src="${url}"><\/script></body>`);
      inner.close();
      this.loaded = new Promise(done => this.frame.addEventListener("load", done));
      addEventListener("message", event => {
        if (event.source !== this.frame.contentWindow) return;
        const message = new MessageEvent("message", {data: event.data});
        this.dispatchEvent(message);
        this.onmessage?.(message);
      });
    }

    postMessage(data) {
      this.loaded.then(() =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data, source: window})));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
