// Browsers start no Worker of a page that was opened as a file. There the search runs in a hidden
// frame instead, which gets and sends the same messages. The theme looks for this file's name.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this._ready = new Promise((resolve, reject) => {
        const frame = document.createElement("iframe");
        frame.hidden = true;
        frame.srcdoc = "<!DOCTYPE html>";
        frame.onload = () => {
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = frame.contentDocument.createElement("script");
          script.onload = () => resolve(inside);
          script.onerror = () => reject(new Error(`${url} cannot be loaded`));
          script.src = url;
          frame.contentDocument.head.append(script);
        };
        document.body.append(frame);
      });
    }

    postMessage(data) {
      this._ready.then((inside) =>
        inside.dispatchEvent(new inside.MessageEvent("message", { data })),
      );
    }
  };
}
